/** An answer token by token: each one's probability, its alternatives, and a fork there. */

import { useState } from "preact/hooks";
import { isConnected } from "../../app/connection.ts";
import type { Answer } from "../conversation/answer.ts";
import { fork } from "../conversation/requests.ts";
import type { Conversation, Message } from "../conversation/conversation.ts";
import { isBusy } from "../conversation/store.ts";
import { band, percent, visible, type Token } from "../conversation/tokens.ts";

interface Props {
  conversation: Conversation;
  message: Message;
  answer: Answer;
}

export function TokenView({ conversation, message, answer }: Props) {
  const [hovered, setHovered] = useState<Token | null>(null);
  const [pinned, setPinned] = useState<Token | null>(null);
  const tokens = answer.tokens.value;
  if (!tokens) return <p class="text soft">Generating the answer again to get its probabilities…</p>;
  const shown = pinned ?? hovered;
  const { prefix } = answer;
  const pin = (index: number) => setPinned(tokens[index] ?? null);
  return (
    <div class="split">
      <div
        class="text tokens"
        role="group"
        aria-label="Tokens"
        onKeyDown={moveByArrows}
        onClick={(event) => pin(placeOf(event))}
        onPointerOver={(event) => setHovered(tokens[placeOf(event)] ?? null)}
        onFocusIn={(event) => setHovered(tokens[placeOf(event)] ?? null)}
      >
        {prefix && <span class="kept">{prefix}</span>}
        {tokens.map((token, i) => (
          <button key={i} type="button" class={`token p${band(token.probability)}${token.isEnd ? " end" : ""}`} data-place={i} tabIndex={token === (pinned ?? tokens[0]) ? 0 : -1} aria-label={`${nameOf(token)}, ${percent(token.probability)}`} aria-pressed={token === pinned}>
            {token.isEnd ? "end" : token.text}
          </button>
        ))}
      </div>
      <Details key={pinned?.at ?? -1} token={shown} isPinned={pinned !== null} onFork={(token, text) => fork(conversation, message, token, text)} />
    </div>
  );
}

function Details({ token, isPinned, onFork }: { token: Token | null; isPinned: boolean; onFork: (token: Token, text?: string) => void }) {
  const [own, setOwn] = useState("");
  if (!token) return <p class="details soft">Point at a token to see its probability; select one to continue differently from there.</p>;
  const isStuck = isBusy.value || !isConnected.value;
  const submit = (event: Event) => {
    event.preventDefault();
    if (own) onFork(token, own);
  };
  const onKey = (event: KeyboardEvent) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) submit(event);
  };
  return (
    <div class="details" role="group" aria-label="This token">
      <div class="choices">
        <strong>
          <code>{nameOf(token)}</code> {percent(token.probability)}
        </strong>
        {token.alternatives.map((other) => (
          <button key={other.text} class="button small" type="button" disabled={isStuck || !other.isText} aria-label={`Continue with ${visible(other.text)}, ${percent(other.probability)}`} onClick={() => onFork(token, other.text)}>
            <code>{visible(other.text)}</code> {percent(other.probability)}
          </button>
        ))}
        <button class="button small" type="button" disabled={isStuck} onClick={() => onFork(token)}>
          Regenerate from here
        </button>
      </div>
      {isPinned && (
        <form class="own" onSubmit={submit}>
          <label class="sr" for="own-text">
            Your own text from here
          </label>
          <textarea id="own-text" rows={1} autocomplete="off" placeholder="or type your own text" value={own} onInput={(event) => setOwn(event.currentTarget.value)} onKeyDown={onKey} />
          <button class="button small" type="submit" disabled={isStuck || !own}>
            Continue from here
          </button>
        </form>
      )}
    </div>
  );
}

const nameOf = (token: Token): string => (token.isEnd ? "end of the answer" : visible(token.text));

function placeOf(event: Event): number {
  return event.target instanceof HTMLElement ? Number(event.target.dataset["place"] ?? -1) : -1;
}

/** The tokens are one Tab stop; arrow keys move between them. */
function moveByArrows(event: KeyboardEvent): void {
  const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
  const from = event.target;
  if (!step || !(from instanceof HTMLElement)) return;
  const next = step > 0 ? from.nextElementSibling : from.previousElementSibling;
  if (!(next instanceof HTMLButtonElement)) return;
  event.preventDefault();
  next.focus();
}
