/** Keys that work anywhere on the page, and the dialog that lists them. None types a character. */

import { signal } from "@preact/signals";
import { show } from "../app/route.ts";
import { Dialog } from "../ui/dialog.tsx";
import { regenerate, toggleTokens } from "./conversation/requests.ts";
import type { Message } from "./conversation/conversation.ts";
import { copy } from "./message/copy.ts";
import { endEdit } from "./conversation/drafts.ts";
import { focusComposer } from "./pane.tsx";
import { announcement, current, newChat, stop } from "./conversation/store.ts";
import { isSettingsOpen } from "./composer/settings.tsx";

export const isHelpOpen = signal(false);

/** On a Mac, Option and a letter type a character. */
const IS_MAC = /^Mac|iP(hone|ad)/.test(navigator.platform);
const WITH = IS_MAC ? "Ctrl Option" : "Alt";

interface Shortcut {
  /** Of KeyboardEvent.code: the same place on every layout. */
  letter: string;
  what: string;
  run: () => void;
}

const SHORTCUTS: readonly Shortcut[] = [
  { letter: "N", what: "New chat", run: newChat },
  { letter: "K", what: "Search chats", run: () => document.getElementById("search")?.focus() },
  { letter: "M", what: "Go to the message field", run: () => (show("chat"), focusComposer()) },
  { letter: "C", what: "Copy the last answer", run: () => void copyLast() },
  { letter: "R", what: "Regenerate the last answer", run: () => withLast((message) => regenerate(current.value, message)) },
  { letter: "T", what: "Show the tokens of the last answer", run: () => withLast(toggleTokens) },
  { letter: "S", what: "Settings", run: () => (isSettingsOpen.value = true) },
];

const FIXED = [
  ["Enter", "Send"],
  ["Shift Enter", "New line"],
  ["↑", "Edit the last question (in an empty field)"],
  ["Esc", "Cancel editing, or stop the answer"],
  ["?", "Show this list"],
] as const;

export function onShortcut(event: KeyboardEvent): void {
  if (document.querySelector("dialog[open]")) return;
  if (event.key === "Escape") return onEscape();
  const isTyping = event.target instanceof Element && event.target.matches("input, textarea, select");
  if (event.key === "?" && !isTyping) isHelpOpen.value = true;
  if (!event.altKey || event.ctrlKey !== IS_MAC || event.metaKey) return;
  const shortcut = SHORTCUTS.find(({ letter }) => `Key${letter}` === event.code);
  if (!shortcut) return;
  event.preventDefault();
  shortcut.run();
}

/** Esc ends an edit first; pressed again, it stops what streams. */
function onEscape(): void {
  if (current.value.edit.value) endEdit(current.value);
  else stop();
}

export function HelpDialog() {
  const rows = [...FIXED, ...SHORTCUTS.map(({ letter, what }) => [`${WITH} ${letter}`, what] as const)];
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
