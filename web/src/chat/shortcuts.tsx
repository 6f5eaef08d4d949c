/** Keys that work anywhere on the page, and the dialog that names them. Alt, so that typing is typing. */

import { signal } from "@preact/signals";
import { show } from "../app/route.ts";
import { Dialog } from "../ui/dialog.tsx";
import { regenerate, toggleTokens } from "./asking.ts";
import type { Message } from "./conversation.ts";
import { copy } from "./copy.ts";
import { focusComposer } from "./pane.tsx";
import { announcement, current, startChat, stop } from "./store.ts";
import { isSettingsOpen } from "./settings.tsx";

export const isHelpOpen = signal(false);

interface Shortcut {
  keys: string;
  /** KeyboardEvent.code, with Alt: the same place on every layout. */
  code: string;
  what: string;
  run: () => void;
}

const SHORTCUTS: readonly Shortcut[] = [
  { keys: "Alt N", code: "KeyN", what: "New chat", run: startChat },
  { keys: "Alt K", code: "KeyK", what: "Search chats", run: () => document.getElementById("search")?.focus() },
  { keys: "Alt M", code: "KeyM", what: "To the message field", run: () => (show("chat"), focusComposer()) },
  { keys: "Alt C", code: "KeyC", what: "Copy the last answer", run: () => void copyLast() },
  { keys: "Alt R", code: "KeyR", what: "Regenerate the last answer", run: () => withLast((message) => regenerate(current.value, message)) },
  { keys: "Alt T", code: "KeyT", what: "Tokens of the last answer", run: () => withLast(toggleTokens) },
  { keys: "Alt S", code: "KeyS", what: "Settings", run: () => (isSettingsOpen.value = true) },
];

const FIXED = [
  ["Enter", "Send"],
  ["Shift Enter", "New line"],
  ["↑", "Edit the last question, in an empty field"],
  ["Esc", "Stop"],
  ["?", "This list"],
] as const;

export function onShortcut(event: KeyboardEvent): void {
  if (document.querySelector("dialog[open]")) return;
  if (event.key === "Escape") return stop();
  const isTyping = event.target instanceof Element && event.target.matches("input, textarea, select");
  if (event.key === "?" && !isTyping) isHelpOpen.value = true;
  if (!event.altKey || event.ctrlKey || event.metaKey) return;
  const shortcut = SHORTCUTS.find(({ code }) => code === event.code);
  if (!shortcut) return;
  event.preventDefault();
  shortcut.run();
}

export function HelpDialog() {
  const rows = [...FIXED, ...SHORTCUTS.map(({ keys, what }) => [keys, what] as const)];
  return (
    <Dialog title="Keyboard shortcuts" open={isHelpOpen} onClose={focusComposer}>
      <dl class="keys">
        {rows.map(([keys, what]) => (
          <div key={keys}>
            <dt>
              {keys.split(" ").map((key) => (
                <kbd key={key}>{key}</kbd>
              ))}
            </dt>
            <dd>{what}</dd>
          </div>
        ))}
      </dl>
      <form method="dialog" class="row">
        <button class="button primary" type="submit">
          Close
        </button>
      </form>
    </Dialog>
  );
}

function withLast(run: (message: Message) => void): void {
  const last = current.value.path.value.findLast((message) => message.answer);
  if (last) run(last);
}

async function copyLast(): Promise<void> {
  const last = current.value.path.value.findLast((message) => message.answer);
  if (last?.answer && (await copy(last.answer.text.value))) announcement.value = "Answer copied";
}
