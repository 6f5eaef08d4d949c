/** Where questions are typed: it grows with the text, Enter sends, Stop takes the place of Send. */

import { useEffect, useRef } from "preact/hooks";
import { ArrowUp, Stop } from "../ui/icons.tsx";
import { canSend, draft, isBusy, send, stop } from "./store.ts";

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
  };
  return (
    <footer class="dock">
      <form class="composer" onSubmit={submit}>
        <label class="sr" for="prompt">
          Message
        </label>
        <textarea ref={box} id="prompt" rows={1} placeholder="Write a message" autocomplete="off" value={text} onInput={(e) => (draft.value = e.currentTarget.value)} onKeyDown={onKey} />
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
