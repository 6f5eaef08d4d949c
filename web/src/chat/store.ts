/** The conversations and what can be done with them. Components read signals and call these. */

import { computed, signal } from "@preact/signals";
import { client, isConnected } from "../app/connection.ts";
import { settings } from "../app/preferences.ts";
import type { Ask, ResponseStream } from "../client/index.ts";
import { Answer } from "./answer.ts";
import { Conversation, inputFor, type Message } from "./conversation.ts";

export const conversations = signal<readonly Conversation[]>([]);
export const current = signal(new Conversation());
/** What is typed and not sent. */
export const draft = signal("");
/** For screen readers: said once, not for every token. */
export const announcement = signal("");

const live = computed(() => current.value.path.value.find((message) => message.answer?.isLive.value)?.answer ?? null);
export const isBusy = computed(() => live.value !== null);
export const canSend = computed(() => isConnected.value && !isBusy.value && draft.value.trim() !== "");

export function send(text: string = draft.value): void {
  const question = text.trim();
  if (!question || !isConnected.value || isBusy.value) return;
  draft.value = "";
  const conversation = current.value;
  if (!conversations.value.includes(conversation)) conversations.value = [conversation, ...conversations.value];
  const message = conversation.add({ role: "user", parent: conversation.leaf.value, text: question, answer: null });
  answer(conversation, message);
}

/** Ask for an answer to a question, beside those that it has. */
export function answer(conversation: Conversation, question: Message): Answer {
  const limit = settings.value.maxTokens;
  const made = new Answer(ask(question, limit), (it) => ended(it, question, limit));
  conversation.add({ role: "assistant", parent: question, text: "", answer: made });
  announcement.value = "Generating an answer";
  return made;
}

export function stop(): void {
  live.value?.stop();
}

export function newChat(): void {
  stop();
  current.value = new Conversation();
  announcement.value = "New chat";
}

export function open(conversation: Conversation): void {
  current.value = conversation;
}

function ask(question: Message, limit: number | null): ResponseStream {
  const { temperature, system } = settings.value;
  const body: Ask = { input: inputFor(question) };
  if (temperature !== null) body.temperature = temperature;
  if (system.trim()) body.instructions = system;
  if (limit !== null) body.max_output_tokens = limit;
  return client.create(body);
}

function ended(it: Answer, question: Message, limit: number | null): void {
  const isFull = it.stream.error?.code === "context_length_exceeded";
  if (isFull && limit !== null && !it.isStopping.value) {
    it.follow(ask(question, null), () => ended(it, question, null)); // a shorter answer may fit
    return;
  }
  it.settle();
  if (isFull && !draft.value) draft.value = question.text;
  announcement.value = "The answer is complete";
}
