/** The history: what was kept is shown again, what was live goes on, and other tabs are heard. */

import { computed, signal } from "@preact/signals";
import { client } from "../app/connection.ts";
import { recall, remember } from "../app/storage.ts";
import { goOn } from "./asking.ts";
import type { Conversation } from "./conversation.ts";
import { hear, keepAll, load, type Word } from "./keeping.ts";
import { addMessage, arrange, fromFile, toConversation, toFile, type KeptMessage } from "./kept.ts";
import { announcement, conversations, current, forget, open } from "./store.ts";

const DETACH_S = 300; // how long an answer goes on while nobody is there: a reload, a walk, a tunnel
const OPEN = "streamer.open"; // the tab's conversation, so that a reload shows it again

/** What is looked for in the history. */
export const query = signal("");

export const found = computed(() => {
  const words = query.value.toLowerCase().split(/\s+/).filter(Boolean);
  const all = conversations.value.filter((conversation) => conversation.messages.value.length > 0);
  return words.length === 0 ? all : all.filter((conversation) => has(conversation, words));
});

function has(conversation: Conversation, words: string[]): boolean {
  const texts = conversation.messages.value.map((message) => message.answer?.text.peek() ?? message.text);
  const all = [conversation.title.value, ...texts].join("\n").toLowerCase();
  return words.every((word) => all.includes(word));
}

export async function begin(): Promise<void> {
  client.update({ detach_s: DETACH_S });
  const loading = load();
  hear((word) => void loading.then(() => onWord(word))); // it may be of what is being loaded
  const kept = await loading;
  const messages = new Map<string, KeptMessage[]>(kept.conversations.map(({ id }) => [id, []]));
  for (const message of kept.messages) messages.get(message.conversation)?.push(message);
  const added = kept.conversations.map((record) => toConversation(record, messages.get(record.id) ?? []));
  const known = new Set(conversations.value.map((conversation) => conversation.id));
  const fresh = added.filter((conversation) => !known.has(conversation.id));
  conversations.value = [...conversations.value, ...fresh].sort((a, b) => b.created - a.created);
  showAgain();
  for (const conversation of fresh) resumeAll(conversation);
  current.subscribe((conversation) => remember("sessionStorage", OPEN, conversation.id));
}

function showAgain(): void {
  if (current.value.messages.value.length > 0) return; // the reader was faster
  const id = recall("sessionStorage", OPEN);
  const last = conversations.value.find((conversation) => conversation.id === id);
  if (last) open(last);
}

function resumeAll(conversation: Conversation): void {
  for (const message of conversation.messages.value) goOn(conversation, message);
}

function onWord(word: Word): void {
  if (word.type === "message") return onMessage(word.record);
  const id = word.type === "dropped" ? word.id : word.record.id;
  const known = conversations.value.find((conversation) => conversation.id === id);
  if (word.type === "dropped") {
    if (known) forget(known);
  } else if (!known) {
    conversations.value = [toConversation(word.record, []), ...conversations.value];
  } else {
    known.name.value = word.record.name;
    // a tab that looks at another path of it stays there
    const isAtEnd = !known.messages.value.some((message) => message.parent === known.leaf.value);
    if (isAtEnd || known !== current.value) arrange(known, word.record);
  }
}

function onMessage(record: KeptMessage): void {
  const conversation = conversations.value.find((other) => other.id === record.conversation);
  if (!conversation) return;
  const known = conversation.messages.value.find((message) => message.id === record.id);
  if (known?.answer && record.answer && !known.answer.isLive.value) known.answer.accept(record.answer);
  const message = known ?? addMessage(conversation, record);
  if (!message) return;
  if (!known && message.parent === conversation.leaf.value) conversation.leaf.value = message;
  goOn(conversation, message);
}

export function exportChats(chosen: readonly Conversation[]): void {
  const blob = new Blob([JSON.stringify(toFile(chosen), null, 1)], { type: "application/json" });
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = chosen.length === 1 && chosen[0] ? `${fileName(chosen[0].title.value)}.json` : "streamer-chats.json";
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

const fileName = (title: string): string => title.replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-|-$/g, "").slice(0, 60) || "chat";

/** Returns what was wrong with the file; "" if nothing. */
export async function importChats(file: File): Promise<string> {
  try {
    const added = fromFile(await file.text());
    conversations.value = [...added, ...conversations.value].sort((a, b) => b.created - a.created);
    if (added[0]) open(added[0]);
    await keepAll(added);
    announcement.value = `${added.length} ${added.length === 1 ? "chat" : "chats"} imported`;
    return "";
  } catch (thrown) {
    return thrown instanceof Error ? thrown.message : String(thrown);
  }
}
