/**
 * One message: a question as it was typed; an answer with its state, figures, faults and actions.
 */

import { useState } from "preact/hooks";
import { Again, Check, Columns, Copy, Left, Onward, Pencil, Right, Tokens } from "../../ui/icons.tsx";
import type { Answer } from "../conversation/answer.ts";
import { isConnected, isTryingAgain, session } from "../../app/connection.ts";
import { continueAnswer, NOT_SENT, reasonToWait, regenerate, send, sendWaiting, takeBack, toggleTokens } from "../conversation/requests.ts";
import { siblings, type Conversation, type Message } from "../conversation/conversation.ts";
import { copy } from "./copy.ts";
import { beginEdit } from "../conversation/drafts.ts";
import { figuresOf, lengthOf, noteOf } from "./figures.ts";
import { isFull } from "../composer/meter.tsx";
import { Pieces, Results, Returned } from "./pieces.tsx";
import { choose, current, isBusy, newChat, prefer, setSystem, showBeside } from "../conversation/store.ts";
import { TokenView } from "./token-view.tsx";

const MAX_BESIDE = 4;

interface Props {
  conversation: Conversation;
  message: Message;
}

export function Question({ conversation, message }: Props) {
  const edit = () => editQuestion(conversation, message);
  const reason = reasonToWait(conversation, message);
  if (reason) return <Waiting conversation={conversation} message={message} reason={reason} />;
  return (
    <article class={conversation.edit.value?.message === message ? "message user edited" : "message user"} data-message={message.id}>
      <Bubble message={message} />
      <div class="actions">
        <Picker conversation={conversation} message={message} what="question" />
        {!message.results && (
          <Action label="Edit question" disabled={isBusy.value} onClick={edit}>
            <Pencil />
          </Action>
        )}
      </div>
    </article>
  );
}

function editQuestion(conversation: Conversation, message: Message): void {
  beginEdit(conversation, message);
  document.getElementById("prompt")?.focus();
}

function Bubble({ message }: { message: Message }) {
  return (
    <div class="bubble">
      <p class="sender">You</p>
      {message.results ? <Results results={message.results} /> : <div class="text">{message.text}</div>}
    </div>
  );
}

function Waiting({ conversation, message, reason }: Props & { reason: string }) {
  const isLast = message === conversation.leaf.value;
  return (
    <article class="message user waits" data-message={message.id}>
      <Bubble message={message} />
      <div class="wait">
        <span>{reason}</span>
        {isLast && reason === NOT_SENT && (
          <button class="button small" type="button" onClick={() => sendWaiting(message)}>
            Send now
          </button>
        )}
        {isLast && (
          <button class="button small" type="button" onClick={() => (takeBack(conversation, message), document.getElementById("prompt")?.focus())}>
            Take back
          </button>
        )}
      </div>
    </article>
  );
}

export function AnswerView({ conversation, message, answer, place }: Props & { answer: Answer; place?: string }) {
  const isLive = answer.isLive.value;
  const isSplit = answer.isOpened.value && !isLive;
  return (
    <article class={isLive ? "message assistant live" : "message assistant"} aria-busy={isLive} aria-label={place} data-message={message.id}>
      <p class="sender">Streamer</p>
      {isSplit ? <TokenView conversation={conversation} message={message} answer={answer} /> : <Pieces answer={answer} />}
      <div class="meta">{[noteOf(answer), ...figuresOf(answer.figures.value, answer.origin.kept)].filter(Boolean).join(" · ")}</div>
      <Progress answer={answer} />
      {isLive && isTryingAgain.value && <p class="lost">The server does not answer; trying again.</p>}
      <Fault conversation={conversation} message={message} answer={answer} />
      {answer.tokensFault.value && <Alert>{answer.tokensFault}</Alert>}
      {!isLive && answer.status.value === "completed" && answer.calls.length > 0 && message === conversation.leaf.value && <Returned conversation={conversation} message={message} answer={answer} />}
      {!isLive && <AnswerActions conversation={conversation} message={message} answer={answer} isBeside={place !== undefined} />}
    </article>
  );
}

function Progress({ answer }: { answer: Answer }) {
  const { done, total } = answer.progress.value;
  if (answer.status.value !== "prefill" || !total) return null;
  return <progress aria-label="Prompt tokens processed" value={done ?? 0} max={total} />;
}

function AnswerActions({ conversation, message, answer, isBeside }: Props & { answer: Answer; isBeside: boolean }) {
  const others = siblings(conversation.messages.value, message);
  const [isCopied, setCopied] = useState(false);
  const copyIt = async () => {
    setCopied(await copy(answer.text.value));
    setTimeout(() => setCopied(false), 1500);
  };
  return (
    <div class="actions">
      {isBeside ? (
        <button class="button small" type="button" onClick={() => prefer(conversation, message)}>
          Continue with this answer
        </button>
      ) : (
        <Picker conversation={conversation} message={message} what="answer" />
      )}
      {!isBeside && answer.isCut && message === conversation.leaf.value && !isFull(conversation) && (
        <button class="button small" type="button" disabled={isBusy.value || !isConnected.value} onClick={() => continueAnswer(conversation, message)}>
          <Onward /> Continue
        </button>
      )}
      <Action label={isCopied ? "Copied" : "Copy answer"} onClick={() => void copyIt()}>
        {isCopied ? <Check /> : <Copy />}
      </Action>
      <Action label="Show tokens" isPressed={answer.isOpened.value} disabled={answer.figures.value.tokens === 0 || !hasTokens(answer)} onClick={() => toggleTokens(message)}>
        <Tokens />
      </Action>
      {!isBeside && (
        <Action label="Regenerate" disabled={isBusy.value} onClick={() => regenerate(conversation, message)}>
          <Again />
        </Action>
      )}
      {!isBeside && others.length > 1 && (
        <Action label="Side by side" onClick={() => showBeside(conversation, others.slice(-MAX_BESIDE))}>
          <Columns />
        </Action>
      )}
    </div>
  );
}

/** Text alone has probabilities; what comes after a call can't be told from it by number. */
const hasTokens = (answer: Answer): boolean => /^(reasoning )*text$/.test(answer.kinds.value);

function Action(props: { label: string; children: preact.ComponentChildren; onClick: () => void; disabled?: boolean; isPressed?: boolean }) {
  const { label, children, onClick, disabled = false, isPressed } = props;
  return (
    <button class="button action" type="button" aria-label={label} title={label} aria-pressed={isPressed} disabled={disabled} onClick={onClick}>
      {children}
    </button>
  );
}

/** ‹ 2/3 ›: which of a message's siblings is shown. */
function Picker({ conversation, message, what }: Props & { what: string }) {
  const all = siblings(conversation.messages.value, message);
  if (all.length < 2) return null;
  const at = all.indexOf(message);
  const go = (step: number) => {
    const other = all[at + step];
    if (other) choose(conversation, other);
  };
  return (
    <div class="picker" role="group" aria-label={`Versions of this ${what}`}>
      <Action label={`Earlier ${what}`} disabled={at === 0} onClick={() => go(-1)}>
        <Left />
      </Action>
      <span>
        {at + 1}/{all.length}
      </span>
      <Action label={`Later ${what}`} disabled={at === all.length - 1} onClick={() => go(1)}>
        <Right />
      </Action>
    </div>
  );
}

function Fault({ conversation, message, answer }: Props & { answer: Answer }) {
  const error = answer.error.value;
  if (!error) return null;
  if (error.code === "gone") return <Alert>{answer.text.value ? "The server no longer has this answer. The text received so far is kept." : error.message}</Alert>;
  if (error.code === "previous_response_not_found") {
    const what = answer.isCut ? "this answer, so it cannot be continued. Regenerate it instead." : "the answer that this one continues. Regenerate that answer, then continue from it.";
    return <Alert>The server no longer has {what}</Alert>;
  }
  if (error.code !== "context_length_exceeded" || !message.parent) return <Alert>{error.message}</Alert>;
  const length = lengthOf(error, session.value?.context_length, conversation.system.value !== "");
  return <TooLong conversation={conversation} question={message.parent} length={length} />;
}

function TooLong({ conversation, question, length }: { conversation: Conversation; question: Message; length: string }) {
  const again = () => {
    const { system } = conversation;
    newChat();
    setSystem(current.value, system.value);
    send(question.text);
  };
  if (question.parent) {
    return (
      <Alert>
        This conversation is too long for the model{length}. Your question is kept.
        <button class="button" type="button" onClick={again}>
          New chat with this question
        </button>
      </Alert>
    );
  }
  return (
    <Alert>
      This message is too long for the model{length}.
      <button class="button" type="button" disabled={isBusy.value} onClick={() => editQuestion(conversation, question)}>
        Edit this message
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
