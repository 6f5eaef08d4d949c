/** The conversations, and which is shown. Components read these signals; asking.ts changes them. */

import { computed, signal } from "@preact/signals";
import { isConnected } from "../app/connection.ts";
import { show } from "../app/route.ts";
import { Conversation, latestBelow, type Message } from "./conversation.ts";
import { drop, keepConversation } from "./keeping.ts";

/** Newest first; one that has no message yet is not among them. */
export const conversations = signal<readonly Conversation[]>([]);
export const current = signal(new Conversation());
/** What is typed and not sent. */
export const draft = signal("");
/** The question that is being written anew; null: none. */
export const editing = signal<Message | null>(null);
/** For screen readers: said once, not for every token. */
export const announcement = signal("");

export const isBusy = computed(() => current.value.live.value.length > 0);
export const canSend = computed(() => isConnected.value && !isBusy.value && draft.value.trim() !== "");

export function stop(): void {
  for (const answer of current.value.live.value) answer.stop();
}

export function newChat(): void {
  current.value = new Conversation();
  editing.value = null;
  announcement.value = "New chat";
}

/** The same, by the reader's wish: from the engine view too. */
export function startChat(): void {
  newChat();
  show("chat");
}

export function open(conversation: Conversation): void {
  current.value = conversation;
  editing.value = null;
}

export function rename(conversation: Conversation, name: string): void {
  conversation.name.value = name.trim() || null;
  keepConversation(conversation);
}

export function remove(conversation: Conversation): void {
  forget(conversation);
  drop(conversation);
  announcement.value = "Chat deleted";
}

/** Out of this tab's sight, whoever deleted it. */
export function forget(conversation: Conversation): void {
  for (const { answer } of conversation.messages.value) {
    answer?.leave();
    answer?.stop();
  }
  conversations.value = conversations.value.filter((other) => other !== conversation);
  if (conversation === current.value) newChat();
}

/** Show the path through this message, to where it was last gone on with. */
export function choose(conversation: Conversation, message: Message): void {
  conversation.beside.value = [];
  conversation.leaf.value = latestBelow(conversation.messages.value, message);
  keepConversation(conversation);
}

/** Of answers side by side, the one to go on with; the others stay a click away. */
export function prefer(conversation: Conversation, message: Message): void {
  conversation.leaf.value = message;
  conversation.beside.value = [];
  keepConversation(conversation);
}

export function showBeside(conversation: Conversation, messages: readonly Message[]): void {
  conversation.beside.value = messages;
  conversation.leaf.value = messages[0] ?? null;
  keepConversation(conversation);
}
