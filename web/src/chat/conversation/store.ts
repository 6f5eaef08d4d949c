/**
 * The conversations, and which is shown. Components read these signals; requests.ts changes them.
 */

import { batch, computed, signal } from "@preact/signals";
import { change, settings } from "../../app/preferences.ts";
import { chatId, moveTo, showChat } from "../../app/route.ts";
import { Conversation, latestBelow, type Message } from "./conversation.ts";
import { dropDraft, keepDraft, restoreDraft } from "./drafts.ts";
import { drop, keepConversation } from "../history/database.ts";

/** Newest first, without those that have no message yet. */
export const conversations = signal<readonly Conversation[]>([]);
/** Whether the database's conversations are loaded. */
export const isLoaded = signal(false);
/** The next new chat, not in the list yet. */
const blank = signal(blankChat());
restoreDraft(blank.value);

const named = computed(() => conversations.value.find(({ id }) => id === chatId.value));
/** The chat that the address names. */
export const current = computed(() => named.value ?? blank.value);
/** The address names a chat that is not here. */
export const isUnknown = computed(() => isLoaded.value && chatId.value !== null && !named.value);
/** For screen readers: announced once, not for every token. */
export const announcement = signal("");

export const isBusy = computed(() => current.value.live.value.length > 0);

function blankChat(): Conversation {
  const conversation = new Conversation();
  conversation.system.value = settings.value.system;
  return conversation;
}

export function stop(): void {
  for (const answer of current.value.live.value) answer.stop();
}

/** The chat has its first message: it gets a place in the history and an address. */
export function enter(conversation: Conversation): void {
  if (conversations.value.includes(conversation)) return;
  const isShown = conversation === current.value;
  batch(() => {
    conversations.value = [conversation, ...conversations.value];
    if (isShown) moveTo(conversation.id);
    if (conversation === blank.value) blank.value = blankChat();
  });
}

export function newChat(): void {
  showChat(null);
  announcement.value = "New chat";
}

export function open(conversation: Conversation): void {
  showChat(conversation.id);
}

export function rename(conversation: Conversation, name: string): void {
  conversation.name.value = name.trim() || null;
  keepConversation(conversation);
}

/** The system prompt of this chat, from the next answer on. */
export function setSystem(conversation: Conversation, text: string): void {
  conversation.system.value = text;
  keepConversation(conversation);
  keepDraft(conversation);
}

/** The system prompt that new chats begin with. */
export function setDefaultSystem(text: string): void {
  change({ system: text });
  if (blank.value !== current.value) blank.value.system.value = text;
}

export function remove(conversation: Conversation): void {
  forget(conversation);
  drop(conversation);
  announcement.value = "Chat deleted";
}

/** Remove it from this tab, whichever tab deleted it. */
export function forget(conversation: Conversation): void {
  for (const { answer } of conversation.messages.value) {
    answer?.leave();
    answer?.stop();
  }
  const wasShown = conversation === current.value;
  batch(() => {
    conversations.value = conversations.value.filter((other) => other !== conversation);
    if (wasShown) moveTo(null);
  });
  dropDraft(conversation);
}

/** Show the path through this message, to the end of its latest continuation. */
export function choose(conversation: Conversation, message: Message): void {
  conversation.beside.value = [];
  conversation.leaf.value = latestBelow(conversation.messages.value, message);
  keepConversation(conversation);
}

/** Choose one of the answers side by side to continue; the others stay siblings. */
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
