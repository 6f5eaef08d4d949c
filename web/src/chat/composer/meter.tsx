/** The share of the context that the chat uses, and the choices when it is full. */

import { session } from "../../app/connection.ts";
import { Plus } from "../../ui/icons.tsx";
import { refusedTokens } from "../conversation/answer.ts";
import type { Conversation } from "../conversation/conversation.ts";
import { newChat } from "../conversation/store.ts";

const NEARLY = 0.85;

/** Tokens of the shown path, by its last answers with a known count; null: none. */
export function usedTokens(conversation: Conversation): number | null {
  let after = 0;
  for (const { answer } of [...conversation.path.value].reverse()) {
    if (!answer) continue;
    const { inputTokens, tokens } = answer.figures.value;
    after += tokens;
    if (inputTokens !== undefined) return inputTokens + after;
  }
  return null;
}

const whole = new Intl.NumberFormat();
const compact = new Intl.NumberFormat(undefined, { notation: "compact", maximumFractionDigits: 1 });
const short = (count: number): string => (count < 10_000 ? whole : compact).format(count);

/** The context is full. */
export function isFull(conversation: Conversation): boolean {
  const used = usedTokens(conversation);
  return used !== null && session.value !== null && used >= session.value.context_length;
}

export function Meter({ conversation }: { conversation: Conversation }) {
  const refused = refusedTokens(conversation.leaf.value?.answer?.error.value ?? null);
  const known = usedTokens(conversation);
  const used = known ?? refused?.count ?? null;
  const length = session.value?.context_length;
  if (used === null || !length) return null;
  const isNearly = used >= NEARLY * length;
  const text = `${short(used)} of ${short(length)} tokens`;
  return (
    <div class="context" data-nearly={isNearly}>
      {isNearly && known !== null && (
        <p class="context-note" role="status">
          <span>
            {used >= length ? "The context is full: nothing more fits into this chat." : "The context is nearly full: answers will be cut short."} Start a new chat, or edit an earlier question and continue from there.
          </span>
          <button class="button small" type="button" onClick={newChat}>
            <Plus /> Start a new chat
          </button>
        </p>
      )}
      <span class="context-now" title="Tokens of the context that this chat uses">
        <meter aria-label="Context used" aria-valuetext={text} min={0} max={length} value={Math.min(used, length)} />
        {text}
      </span>
    </div>
  );
}
