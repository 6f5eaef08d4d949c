/** Requests to the server: questions, edited ones, further answers, forks, an answer's tokens. */

import { effect, signal, untracked } from "@preact/signals";
import { client, connection, isConnected } from "../../app/connection.ts";
import { settings } from "../../app/preferences.ts";
import { recall, remember } from "../../app/storage.ts";
import type { Ask, Fork, ResponseStream } from "../../client/index.ts";
import { Answer, type Listener, type Origin } from "./answer.ts";
import { inputFor, pathTo, type CallResult, type Conversation, type Message } from "./conversation.ts";
import { dropDraft, endEdit, type, typed } from "./drafts.ts";
import { dropMessage, keepConversation, keepMessage, keepSoon } from "../history/database.ts";
import { askOf } from "./sampling.ts";
import { announcement, conversations, current, enter, isBusy, newChat, remove } from "./store.ts";
import { NUM_ALTERNATIVES, TokenReader, type Token } from "./tokens.ts";

const WAITING = "streamer.waiting";

/** Ids of this tab's waiting questions; those of another tab are sent by that tab. */
export const waiting = signal<ReadonlySet<string>>(new Set(recall("sessionStorage", WAITING)?.split(" ").filter(Boolean)));

function setWaiting(change: (ids: Set<string>) => void): void {
  const ids = new Set(waiting.value);
  change(ids);
  waiting.value = ids;
  remember("sessionStorage", WAITING, ids.size > 0 ? [...ids].join(" ") : null);
}

/**
 * Send the typed text: at once, or when the server is reachable and the answer before has ended.
 */
export function send(text: string = typed(current.value)): void {
  const question = text.trim();
  if (!question) return;
  const conversation = current.value;
  const edited = conversation.edit.value?.message;
  if (edited) endEdit(conversation);
  else {
    conversation.draft.value = "";
    dropDraft(conversation);
  }
  conversation.beside.value = [];
  const parent = edited ? edited.parent : conversation.leaf.value;
  const message = conversation.add({ role: "user", parent, text: question, answer: null });
  enter(conversation);
  keepConversation(conversation);
  keepMessage(conversation, message);
  sendWaiting(message);
}

export function sendWaiting(message: Message): void {
  setWaiting((ids) => ids.add(message.id));
  if (reasonToWait(current.value, message)) announcement.value = "The message is waiting to be sent";
}

export const NOT_SENT = "Not sent.";

/** Why a question is not sent yet; null: it is sent, or will be at once. */
export function reasonToWait(conversation: Conversation, message: Message): string | null {
  const path = conversation.path.value;
  const place = path.indexOf(message);
  if (place < 0 || path.slice(place).some((later) => later.answer)) return null;
  if (!waiting.value.has(message.id)) return NOT_SENT;
  const isAway = !isConnected.value;
  if (isAway) return connection.value.name === "locked" ? "Waiting for the API key that this server requires." : "Waiting for the server. It will be sent once the connection is back.";
  return conversation.live.value.length > 0 ? "Waiting for the current answer to finish." : null;
}

/** Move a question out of the chat and back into the field. */
export function takeBack(conversation: Conversation, message: Message): void {
  setWaiting((ids) => ids.delete(message.id));
  if (conversation.edit.value?.message === message) endEdit(conversation);
  conversation.remove(message);
  dropMessage(conversation, message);
  if (conversation.messages.value.length === 0) {
    remove(conversation);
    newChat();
  } else keepConversation(conversation);
  const into = current.value;
  endEdit(into);
  type(into, [message.text, into.draft.value].filter(Boolean).join("\n\n"));
}

/** Send waiting questions whenever they can be sent; called once. */
export function sendWaitingQuestions(): void {
  effect(() => {
    if (!isConnected.value || waiting.value.size === 0) return;
    for (const conversation of conversations.value) {
      const leaf = conversation.leaf.value;
      if (leaf && waiting.value.has(leaf.id) && conversation.live.value.length === 0) untracked(() => sendOne(conversation, leaf));
    }
  });
}

function sendOne(conversation: Conversation, question: Message): void {
  // the questions before it are part of its turn
  setWaiting((ids) => pathTo(question).forEach(({ id }) => ids.delete(id)));
  answer(conversation, question, settings.value.answers);
}

/** Request answers to a question, beside those that it has. */
export function answer(conversation: Conversation, question: Message, count = 1): void {
  const first = askOf(settings.value, conversation.system.value);
  const made = Array.from({ length: count }, (_, i) => {
    const ask = first.seed != null ? { ...first, seed: first.seed + i } : first;
    return add(conversation, question, { ask, fork: null });
  });
  if (count > 1) {
    conversation.beside.value = made;
    conversation.leaf.value = made[0] ?? null;
  } else conversation.beside.value = [];
  keepConversation(conversation);
  announcement.value = count > 1 ? `Generating ${count} answers` : "Generating an answer";
}

export function regenerate(conversation: Conversation, message: Message): void {
  if (message.parent && isConnected.value && !isBusy.value) answer(conversation, message.parent);
}

/** Give what the called tools returned: the next turn. */
export function sendResults(conversation: Conversation, message: Message, results: readonly CallResult[]): void {
  conversation.beside.value = [];
  const returned = conversation.add({ role: "user", parent: message, text: "", answer: null, results });
  keepConversation(conversation);
  keepMessage(conversation, returned);
  sendWaiting(returned);
}

/** Continue an answer from one of its tokens, which is drawn again or replaced by `text`. */
export function fork(conversation: Conversation, message: Message, token: Token, text?: string): void {
  if (!message.parent || isBusy.value || !isConnected.value) return;
  const at: Fork = { at: token.at };
  if (text) at.text = text;
  const { seed: _, ...ask } = askOf(settings.value, conversation.system.value);
  conversation.beside.value = [];
  add(conversation, message.parent, { ask, fork: { id: token.from, at }, kept: (message.answer?.origin.kept ?? 0) + token.at });
  keepConversation(conversation);
  announcement.value = "Generating another ending";
}

/** Continue an answer that a limit or the user ended. */
export function continueAnswer(conversation: Conversation, message: Message): void {
  const it = message.answer;
  if (!it?.isCut || it.responseId === null || !message.parent || isBusy.value || !isConnected.value) return;
  const { tokens } = it.figures.value;
  const { seed: _, ...ask } = askOf(settings.value, conversation.system.value);
  const origin: Origin = { ask, fork: { id: it.responseId, at: { at: tokens } }, kept: (it.origin.kept ?? 0) + tokens };
  it.extend(origin, begin(message.parent, origin), listenerFor(conversation, message));
  announcement.value = "Continuing the answer";
}

/** Tokens in place of the text, or the text again. */
export function toggleTokens(message: Message): void {
  const it = message.answer;
  if (!it) return;
  if (!it.isOpened.value) return void loadTokens(message);
  it.isOpened.value = false;
  it.drawing?.cancel();
}

/** Generate a finished answer again, with its seed, to show its tokens. */
async function loadTokens(message: Message): Promise<void> {
  const it = message.answer;
  if (!it || !message.parent || it.isLive.value) return;
  it.isOpened.value = true;
  it.tokensFault.value = "";
  if (it.tokens.value) return;
  const { tokens } = it.figures.value;
  const request: Ask = { ...it.origin.ask, include: ["message.output_text.logprobs"], top_logprobs: NUM_ALTERNATIVES, max_output_tokens: Math.max(1, tokens) };
  if (it.seed !== null) request.seed = it.seed;
  const stream = begin(message.parent, { ...it.origin, ask: request });
  it.drawing = stream;
  const reader = new TokenReader();
  stream.on("delta", (event) => reader.add(event, stream.id ?? ""));
  await stream.done;
  if (it.drawing !== stream || stream.isCancelled) return; // superseded or cancelled
  it.drawing = null;
  if (stream.text === it.text.value) {
    it.prefix = reader.prefix;
    it.tokens.value = it.isPlain ? reader.finished() : reader.finished(stream.tokens, stream.status === "completed");
  } else {
    it.isOpened.value = false;
    it.tokensFault.value = stream.error?.message ?? "The server generated different tokens this time, so their probabilities cannot be shown.";
  }
}

/** Follow answers that were live when the page was last open, or are live in another tab. */
export function resumeAnswer(conversation: Conversation, message: Message): void {
  const it = message.answer;
  if (!it?.isUnfinished || it.responseId === null) return;
  const { after, text, pieces } = it.keep();
  it.follow(client.resume({ id: it.responseId, after, text: after < 0 ? "" : text, ...(pieces && { pieces }) }), listenerFor(conversation, message));
}

/** Request an answer again whose page was left before its id came. */
export function askAgain(conversation: Conversation, message: Message): void {
  const { answer: it, parent } = message;
  if (it && parent) it.follow(begin(parent, it.origin), listenerFor(conversation, message));
}

function add(conversation: Conversation, question: Message, origin: Origin): Message {
  const made = new Answer(origin);
  const message = conversation.add({ role: "assistant", parent: question, text: "", answer: made });
  made.follow(begin(question, origin), listenerFor(conversation, message));
  keepMessage(conversation, message);
  return message;
}

function begin(question: Message, { ask, fork: from }: Origin): ResponseStream {
  if (from) {
    const { instructions: _, ...body } = ask; // the parent's instructions stay
    return client.fork(from.id, from.at, body);
  }
  return client.create({ ...ask, input: inputFor(question) });
}

function listenerFor(conversation: Conversation, message: Message): Listener {
  const listener: Listener = {
    created: () => {
      keepMessage(conversation, message);
      keepConversation(conversation);
    },
    grown: () => keepSoon(conversation, message),
    ended: (it) => ended(conversation, message, it, listener),
  };
  return listener;
}

function ended(conversation: Conversation, message: Message, it: Answer, listener: Listener): void {
  const question = message.parent;
  const isFull = it.stream?.error?.code === "context_length_exceeded";
  const isLimited = it.stream?.body.max_output_tokens != null;
  if (isFull && isLimited && !it.isStopping.value && question) {
    const { max_output_tokens: _, ...ask } = it.origin.ask; // a shorter answer may fit
    it.follow(begin(question, { ...it.origin, ask }), listener);
    return;
  }
  it.settle();
  keepMessage(conversation, message);
  if (isFull && !typed(conversation) && question?.parent && conversation === current.value) type(conversation, question.text);
  if (it.status.value === "failed") setWaiting((ids) => followers(conversation, message).forEach(({ id }) => ids.delete(id)));
  if (conversation.live.value.length === 0) announcement.value = outcomeOf(it);
}

/** Questions that waited for this answer: the answer is missing, so they wait for the user. */
const followers = (conversation: Conversation, message: Message): Message[] => conversation.messages.value.filter(({ parent }) => parent === message);

function outcomeOf(it: Answer): string {
  const { status } = it;
  if (status.value === "cancelled") return "Stopped";
  if (status.value === "failed" || status.value === "gone") return "The answer failed";
  const names = it.calls.map(({ name }) => name);
  return names.length > 0 ? `The answer calls ${names.join(", ")}` : "The answer is complete";
}
