/** What asks the server: a question, another answer, an edited question, a fork, a look at the tokens. */

import { client, isConnected } from "../app/connection.ts";
import { settings } from "../app/preferences.ts";
import type { Ask, Fork, ResponseStream } from "../client/index.ts";
import { Answer, type Listener, type Origin } from "./answer.ts";
import { inputFor, type Conversation, type Message } from "./conversation.ts";
import { keepConversation, keepMessage, keepSoon } from "./keeping.ts";
import { askOf } from "./sampling.ts";
import { announcement, conversations, current, draft, editing, isBusy } from "./store.ts";
import { NUM_ALTERNATIVES, TokenReader, type Token } from "./tokens.ts";

export function send(text: string = draft.value): void {
  const question = text.trim();
  if (!question || !isConnected.value || isBusy.value) return;
  draft.value = "";
  const conversation = current.value;
  const edited = editing.value;
  editing.value = null;
  if (!conversations.value.includes(conversation)) conversations.value = [conversation, ...conversations.value];
  conversation.beside.value = [];
  const parent = edited ? edited.parent : conversation.leaf.value;
  const message = conversation.add({ role: "user", parent, text: question, answer: null });
  keepConversation(conversation);
  keepMessage(conversation, message);
  answer(conversation, message, settings.value.answers);
}

/** Ask for answers to a question, beside those that it has. */
export function answer(conversation: Conversation, question: Message, count = 1): void {
  const first = askOf(settings.value);
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

/** Go on with an answer from one of its tokens: drawn anew, or with `text` in its place. */
export function fork(conversation: Conversation, message: Message, token: Token, text?: string): void {
  if (!message.parent || isBusy.value || !isConnected.value) return;
  const at: Fork = { at: token.at };
  if (text) at.text = text;
  const { seed: _, ...ask } = askOf(settings.value);
  conversation.beside.value = [];
  add(conversation, message.parent, { ask, fork: { id: token.from, at } });
  keepConversation(conversation);
  announcement.value = "Generating another ending";
}

/** Tokens in place of the text, or the text again. */
export function toggleTokens(message: Message): void {
  const it = message.answer;
  if (!it) return;
  if (!it.isOpened.value) return void look(message);
  it.isOpened.value = false;
  it.drawing?.cancel();
}

/** Draw a finished answer once more, with its seed, to see its tokens. */
async function look(message: Message): Promise<void> {
  const it = message.answer;
  if (!it || !message.parent || it.isLive.value) return;
  it.isOpened.value = true;
  it.lookFault.value = "";
  if (it.tokens.value) return;
  const { tokens } = it.figures.value;
  const wanted: Ask = { ...it.origin.ask, include: ["message.output_text.logprobs"], top_logprobs: NUM_ALTERNATIVES, max_output_tokens: Math.max(1, tokens) };
  if (it.seed !== null) wanted.seed = it.seed;
  const stream = begin(message.parent, { ...it.origin, ask: wanted });
  it.drawing = stream;
  const reader = new TokenReader();
  stream.on("delta", (event) => reader.add(event, stream.id ?? ""));
  await stream.done;
  if (it.drawing !== stream || stream.isCancelled) return; // nobody waits for it any more
  it.drawing = null;
  if (stream.text === it.text.value) {
    it.prefix = reader.prefix;
    it.tokens.value = reader.finished();
  } else {
    it.isOpened.value = false;
    it.lookFault.value = stream.error?.message ?? "The server drew other tokens this time, so there is nothing to show.";
  }
}

/** Follow what was live when the page was last open, or is live in another tab. */
export function goOn(conversation: Conversation, message: Message): void {
  const it = message.answer;
  if (!it?.isUnfinished || it.responseId === null) return;
  const { after, text } = it.keep();
  it.follow(client.resume({ id: it.responseId, after, text }), listenerFor(conversation, message));
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
    const { instructions: _, ...body } = ask; // the parent's stand
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
  if (isFull && !draft.value && question && conversation === current.value) draft.value = question.text;
  if (conversation.live.value.length === 0) announcement.value = said(it);
}

function said(it: Answer): string {
  const { status } = it;
  if (status.value === "cancelled") return "Stopped";
  return status.value === "failed" || status.value === "gone" ? "The answer failed" : "The answer is complete";
}
