/** One message: a question as it was typed; an answer with its state, figures and faults. */

import type { Answer, Figures } from "./answer.ts";
import type { Message } from "./conversation.ts";
import { newChat, send } from "./store.ts";

export function Question({ message }: { message: Message }) {
  return (
    <article class="message user">
      <p class="who">You</p>
      <div class="text">{message.text}</div>
    </article>
  );
}

export function AnswerView({ answer, isFirst, question }: { answer: Answer; isFirst: boolean; question: string }) {
  const isLive = answer.isLive.value;
  return (
    <article class={isLive ? "message assistant live" : "message assistant"} aria-busy={isLive}>
      <p class="who">Streamer</p>
      <div class="text">{answer.text}</div>
      <div class="meta">{[note(answer), ...figures(answer.figures.value)].filter(Boolean).join(" · ")}</div>
      <Fault answer={answer} isFirst={isFirst} question={question} />
    </article>
  );
}

function Fault({ answer, isFirst, question }: { answer: Answer; isFirst: boolean; question: string }) {
  const error = answer.error.value;
  if (!error) return null;
  if (error.code !== "context_length_exceeded") return <Alert>{error.message}</Alert>;
  if (isFirst) return <Alert>This message is longer than the model can read.</Alert>;
  const again = () => {
    newChat();
    send(question);
  };
  return (
    <Alert>
      This conversation is too long for the model. Your question is kept.
      <button class="button" type="button" onClick={again}>
        New chat with this question
      </button>
    </Alert>
  );
}

function Alert({ children }: { children: preact.ComponentChildren }) {
  return (
    <div class="fault" role="alert">
      {children}
    </div>
  );
}

function note(answer: Answer): string {
  const { position, done, total } = answer.progress.value;
  if (answer.isLive.value && answer.isStopping.value) return "stopping";
  switch (answer.status.value) {
    case "sending":
      return "sending";
    case "waiting":
      return position ? `waiting, ${position} before it` : "waiting";
    case "prefill":
      return `reading ${done ?? 0} of ${total ?? 0} tokens`;
    case "preempted":
      return "preempted, will go on";
    case "paused":
      return "paused";
    case "cancelled":
      return "stopped";
    case "incomplete":
      return "length limit reached";
    default:
      return "";
  }
}

function figures({ tokens, tokensPerS, firstMs, cachedTokens }: Figures): string[] {
  if (firstMs === null) return [];
  return [
    `${tokens} token${tokens === 1 ? "" : "s"}`,
    tokensPerS ? `${tokensPerS < 10 ? tokensPerS.toFixed(1) : Math.round(tokensPerS)} tokens/s` : "",
    `first token after ${Math.max(1, Math.round(firstMs))} ms`,
    cachedTokens ? `${cachedTokens} from the cache` : "",
  ];
}
