/** Where questions are typed: it grows with the text, Enter sends, Stop takes the place of Send. */

import { useEffect, useRef } from "preact/hooks";
import { change, settings } from "../app/preferences.ts";
import { ArrowUp, Close, Columns, Stop } from "../ui/icons.tsx";
import { send } from "./asking.ts";
import { canSend, current, draft, editing, isBusy, stop } from "./store.ts";

const COUNTS = [1, 2, 3, 4];

export function Composer() {
  const box = useRef<HTMLTextAreaElement>(null);
  const text = draft.value;
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
    if (event.key === "ArrowUp" && !draft.value && !isBusy.value) editLast(event);
  };
  return (
    <footer class="dock">
      <form class="composer" onSubmit={submit}>
        {editing.value && <Editing />}
        <label class="sr" for="prompt">
          Message
        </label>
        <textarea ref={box} id="prompt" rows={1} placeholder="Write a message" autocomplete="off" value={text} onInput={(e) => (draft.value = e.currentTarget.value)} onKeyDown={onKey} />
        <Count />
        {isBusy.value ? (
          <button key="stop" class="button act stop" type="button" aria-label="Stop" onClick={() => (stop(), box.current?.focus())}>
            <Stop />
          </button>
        ) : (
          <button key="send" class="button act primary" type="submit" aria-label="Send" disabled={!canSend.value}>
            <ArrowUp />
          </button>
        )}
      </form>
      <p class="hint">Enter sends, Shift+Enter starts a new line, Esc stops. Small models make things up.</p>
    </footer>
  );
}

function Count() {
  return (
    <span class="count" title="Answers side by side">
      <Columns />
      <select aria-label="Answers to each question" onChange={(e) => change({ answers: Number(e.currentTarget.value) })}>
      {COUNTS.map((count) => (
        <option key={count} value={count} selected={count === settings.value.answers}>
          {count}×
        </option>
      ))}
      </select>
    </span>
  );
}

function Editing() {
  const cancel = () => {
    editing.value = null;
    draft.value = "";
    document.getElementById("prompt")?.focus();
  };
  return (
    <div class="editing">
      <span>Editing a question; the earlier one stays in the picker</span>
      <button class="button action" type="button" aria-label="Do not edit" onClick={cancel}>
        <Close />
      </button>
    </div>
  );
}

function editLast(event: KeyboardEvent): void {
  const last = current.value.path.value.findLast((message) => message.role === "user");
  if (!last) return;
  event.preventDefault();
  editing.value = last;
  draft.value = last.text;
}
