/** The history: loads stored chats, resumes live answers, and follows changes of other tabs. */

import { client } from "../../app/connection.ts";
import { askAgain, resumeAnswer, sendWaitingQuestions } from "../conversation/requests.ts";
import type { Conversation } from "../conversation/conversation.ts";
import { restoreDraft } from "../conversation/drafts.ts";
import { keepAll, leave, listen, load, type TabMessage } from "./database.ts";
import { addMessage, arrange, fromFile, merge, toConversation, toFile, type KeptMessage } from "./records.ts";
import { announcement, conversations, current, forget, isLoaded, open } from "../conversation/store.ts";

const DETACH_S = 300; // how long an answer runs without a reader: a reload, a cut network

export async function begin(): Promise<void> {
  client.update({ detach_s: DETACH_S });
  const loading = load();
  addEventListener("pagehide", leave);
  // it may concern a chat that is being loaded
  listen((message) => void loading.then(() => onTabMessage(message)));
  const kept = await loading;
  const messages = new Map<string, KeptMessage[]>(kept.conversations.map(({ id }) => [id, []]));
  for (const message of kept.messages) messages.get(message.conversation)?.push(message);
  const added = kept.conversations.map((record) => toConversation(record, messages.get(record.id) ?? []));
  const known = new Set(conversations.value.map((conversation) => conversation.id));
  const fresh = added.filter((conversation) => !known.has(conversation.id));
  conversations.value = [...conversations.value, ...fresh].sort((a, b) => b.created - a.created);
  for (const conversation of fresh) restoreDraft(conversation);
  isLoaded.value = true;
  for (const conversation of fresh) {
    for (const message of conversation.messages.value) (kept.unanswered.has(message.id) ? askAgain : resumeAnswer)(conversation, message);
  }
  sendWaitingQuestions();
}

function onTabMessage(message: TabMessage): void {
  if (message.type === "restored") return;
  if (message.type === "message") return onMessage(message.record);
  if (message.type === "message-dropped") return onMessageDropped(message.conversation, message.id);
  const id = message.type === "dropped" ? message.id : message.record.id;
  const known = conversations.value.find((conversation) => conversation.id === id);
  if (message.type === "dropped") {
    if (known) forget(known);
  } else if (!known) {
    conversations.value = [toConversation(message.record, []), ...conversations.value];
  } else {
    known.name.value = message.record.name;
    known.system.value = message.record.system ?? "";
    // a tab that shows another path of it stays there
    const isAtEnd = !known.messages.value.some((message) => message.parent === known.leaf.value);
    if (isAtEnd || known !== current.value) arrange(known, message.record);
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
  resumeAnswer(conversation, message);
}

function onMessageDropped(id: string, message: string): void {
  const conversation = conversations.value.find((other) => other.id === id);
  const known = conversation?.messages.value.find((other) => other.id === message);
  if (known) conversation?.remove(known);
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

/** Import what is not here yet. Returns what is wrong with the file; "" if nothing. */
export async function importChats(file: File): Promise<string> {
  try {
    const read = fromFile(await file.text());
    const changed = addImported(read);
    await keepAll(changed);
    if (changed[0]) open(changed[0]);
    announcement.value = changed.length > 0 ? `${numberOf(changed)} imported` : `Nothing new in this file: ${numberOf(read)}`;
    return "";
  } catch (thrown) {
    return thrown instanceof Error ? thrown.message : String(thrown);
  }
}

const numberOf = ({ length }: readonly Conversation[]): string => `${length} ${length === 1 ? "chat" : "chats"}`;

/** Chats that are new or have new messages. */
function addImported(read: readonly Conversation[]): Conversation[] {
  const ids = new Map(conversations.value.flatMap(({ id, messages }) => messages.value.map((message) => [message.id, id])));
  for (const { id, messages } of read) {
    if (messages.value.some((message) => (ids.get(message.id) ?? id) !== id)) throw new Error("This file contains messages of a different chat in this browser.");
  }
  const changed = read.flatMap((other) => {
    const own = conversations.value.find(({ id }) => id === other.id);
    if (own) return merge(own, other) > 0 ? [own] : [];
    conversations.value = [...conversations.value, other];
    return [other];
  });
  conversations.value = [...conversations.value].sort((a, b) => b.created - a.created);
  return changed;
}
