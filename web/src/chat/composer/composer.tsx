/** The question field: it grows with the text, Enter sends, Stop shows while an answer streams. */

import { useEffect, useRef } from "preact/hooks";
import { change, settings } from "../../app/preferences.ts";
import { ArrowUp, Close, Columns, Sliders, Stop } from "../../ui/icons.tsx";
import { reasonToWait, send, takeBack } from "../conversation/requests.ts";
import { beginEdit, endEdit, type, typed } from "../conversation/drafts.ts";
import { toolsOf } from "../conversation/sampling.ts";
import { Meter } from "./meter.tsx";
import { isSettingsOpen } from "./settings.tsx";
import { current, isBusy, stop } from "../conversation/store.ts";

const COUNTS = [1, 2, 3, 4];

export function Composer() {
  const box = useRef<HTMLTextAreaElement>(null);
  const conversation = current.value;
  const text = typed(conversation);
  useEffect(() => {
    const area = box.current;
    if (!area) return;
    area.style.height = "auto";
    area.style.height = `${area.scrollHeight}px`;
  }, [text]);
  const submit = (event: Event) => {
    event.preventDefault();
    send();
    box.current?.focus();
  };
  const onKey = (event: KeyboardEvent) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) submit(event);
    if (event.key === "ArrowUp" && !text && !isBusy.value) editLast(event);
  };
  const isFilled = text.trim() !== "";
  return (
    <footer class="dock">
      <form class="composer" onSubmit={submit}>
        {conversation.edit.value && <Editing />}
        <label class="sr" for="prompt">
          Message
        </label>
        <textarea ref={box} id="prompt" rows={1} placeholder="Write a message" autocomplete="off" value={text} onInput={(e) => type(conversation, e.currentTarget.value)} onKeyDown={onKey} />
        <Count />
        {isBusy.value && (
          <button key="stop" class="button act stop" type="button" aria-label="Stop" onClick={() => (stop(), box.current?.focus())}>
            <Stop />
          </button>
        )}
        {(!isBusy.value || isFilled) && (
          <button key="send" class="button act primary" type="submit" aria-label={isBusy.value ? "Send after this answer" : "Send"} disabled={!isFilled}>
            <ArrowUp />
          </button>
        )}
      </form>
      <div class="under">
        <p class="hint">Enter sends, Shift+Enter starts a new line, Esc stops. Small models make things up.</p>
        <Meter conversation={conversation} />
        {!toolsOf(settings.value.tools) && <NoTools />}
      </div>
    </footer>
  );
}

function Count() {
  return (
    <span class="count" title="Answers side by side">
      <Columns />
      <select aria-label="Answers per question" onChange={(e) => change({ answers: Number(e.currentTarget.value) })}>
      {COUNTS.map((count) => (
        <option key={count} value={count} selected={count === settings.value.answers}>
          {count}×
        </option>
      ))}
      </select>
    </span>
  );
}

function NoTools() {
  return (
    <p class="tools-note" role="status">
      <span>Tools are not sent: what the settings have is not a JSON list of functions.</span>
      <button class="button small" type="button" aria-haspopup="dialog" onClick={() => (isSettingsOpen.value = true)}>
        <Sliders /> Change the tools
      </button>
    </p>
  );
}

function Editing() {
  const cancel = () => {
    endEdit(current.value);
    document.getElementById("prompt")?.focus();
  };
  return (
    <div class="editing">
      <span>Editing a question. The original stays available as an earlier version.</span>
      <button class="button action" type="button" aria-label="Cancel editing" title="Cancel editing (Esc)" onClick={cancel}>
        <Close />
      </button>
    </div>
  );
}

function editLast(event: KeyboardEvent): void {
  const last = current.value.path.value.findLast((message) => message.role === "user");
  if (!last) return;
  event.preventDefault();
  if (reasonToWait(current.value, last)) takeBack(current.value, last);
  else beginEdit(current.value, last);
}
