/** The parts of an answer that are not its text: reasoning, and calls of tools with their results. */

import { useComputed } from "@preact/signals";
import { useId, useState } from "preact/hooks";
import { isConnected } from "../../app/connection.ts";
import type { Piece } from "../../client/index.ts";
import { Right, Wrench } from "../../ui/icons.tsx";
import type { Answer } from "../conversation/answer.ts";
import { sendResults } from "../conversation/requests.ts";
import type { CallResult, Conversation, Message } from "../conversation/conversation.ts";
import { isBusy } from "../conversation/store.ts";
import { Prose } from "./prose.tsx";
import { pretty } from "./pretty.ts";

/** All of an answer, piece by piece; a piece is drawn again only where it changed. */
export function Pieces({ answer }: { answer: Answer }) {
  const kinds = answer.kinds.value.split(" ");
  return (
    <>
      {kinds.map((kind, i) => {
        if (kind === "reasoning") return <Thought key={i} answer={answer} place={i} isLast={i === kinds.length - 1} />;
        if (kind === "call") return <Call key={i} answer={answer} place={i} />;
        return <Prose key={i} answer={answer} place={i} />;
      })}
    </>
  );
}

interface Props {
  answer: Answer;
  place: number;
}

const EMPTY: Piece = { kind: "text", text: "", isDone: false };
const usePiece = ({ answer, place }: Props): Piece => useComputed(() => answer.pieces.value[place] ?? EMPTY).value;

/** Open until something follows it, unless the user decided otherwise. */
function Thought({ answer, place, isLast }: Props & { isLast: boolean }) {
  const { text, ms, isDone } = usePiece({ answer, place });
  const [chosen, choose] = useState<boolean | null>(null);
  const id = useId();
  const isOpen = chosen ?? isLast;
  const isLive = answer.isLive.value && isLast && !isDone;
  return (
    <section class={isLive ? "thought live" : "thought"}>
      <button class="fold" type="button" aria-expanded={isOpen} aria-controls={id} onClick={() => choose(!isOpen)}>
        <Right />
        {isLive ? "Thinking" : "Thought"}
        {ms !== undefined && ms >= 1000 && ` for ${lasting(ms)}`}
      </button>
      <div class={isOpen ? "folded open" : "folded"}>
        <div id={id} class="thinking" role="region" aria-label="Reasoning" tabIndex={0}>
          <div>{text}</div>
        </div>
      </div>
    </section>
  );
}

function lasting(ms: number): string {
  const seconds = Math.round(ms / 1000);
  return seconds < 60 ? `${seconds} s` : `${Math.floor(seconds / 60)} min ${seconds % 60} s`;
}

function Call(props: Props) {
  const { name, text, isDone } = usePiece(props);
  const isWriting = !isDone && props.answer.isLive.value;
  return (
    <section class="call" aria-label={`Call of ${name}`}>
      <p class="call-name">
        <Wrench />
        <code>{name}</code>
        <span class="soft">{isWriting ? "writing its arguments" : "called"}</span>
      </p>
      <pre tabIndex={0} role="region" aria-label={`Arguments of ${name}`}>{pretty(text)}</pre>
    </section>
  );
}

/** A field for what each call returned; sent, they are the next turn. */
export function Returned({ conversation, message, answer }: { conversation: Conversation; message: Message; answer: Answer }) {
  const [outputs, setOutputs] = useState<Record<number, string>>({});
  const id = useId();
  const { calls } = answer;
  const submit = (event: Event) => {
    event.preventDefault();
    const results = calls.map(({ name = "", callId = "" }, i): CallResult => ({ callId, name, output: outputs[i] ?? "" }));
    sendResults(conversation, message, results);
  };
  return (
    <form class="returned" onSubmit={submit}>
      {calls.map(({ name, callId }, i) => (
        <div key={callId} class="field">
          <label for={`${id}-${i}`}>Result of {name}</label>
          <textarea id={`${id}-${i}`} rows={2} value={outputs[i] ?? ""} onInput={(e) => setOutputs({ ...outputs, [i]: e.currentTarget.value })} />
        </div>
      ))}
      <button class="button small" type="submit" disabled={isBusy.value || !isConnected.value}>
        {calls.length > 1 ? "Send results" : "Send result"}
      </button>
    </form>
  );
}

export function Results({ results }: { results: readonly CallResult[] }) {
  return (
    <>
      {results.map(({ callId, name, output }) => (
        <div key={callId}>
          <p class="call-name">
            <Wrench />
            <code>{name}</code>
            <span class="soft">returned</span>
          </p>
          <div class="text">{output || "(nothing)"}</div>
        </div>
      ))}
    </>
  );
}
