/**
 * Database: conversations in this browser's IndexedDB; every change is reported to its other tabs.
 *
 * A message is a record of its own, so that two tabs add to one conversation without loss. Nothing
 * waits for a write; without a database (private mode, a full disk) the page works while it is
 * open, and shows that nothing is stored.
 */

import { signal } from "@preact/signals";
import { openDB, type DBSchema, type IDBPDatabase } from "idb";
import { asKeptConversation, asKeptMessage, type KeptConversation, type KeptMessage } from "./records.ts";
import type { Conversation, Message } from "../conversation/conversation.ts";

interface Schema extends DBSchema {
  conversations: { key: string; value: KeptConversation };
  messages: { key: string; value: KeptMessage; indexes: { conversation: string } };
}

/** What a tab reports to the others. */
export type TabMessage =
  | { type: "conversation"; record: KeptConversation }
  | { type: "message"; record: KeptMessage }
  | { type: "message-dropped"; conversation: string; id: string }
  | { type: "dropped"; id: string }
  | { type: "restored"; id: string };

const EVERY_MS = 1000; // between two writes of an answer that grows
const channel = typeof BroadcastChannel === "undefined" ? null : new BroadcastChannel("streamer");
const due = new Map<Message, ReturnType<typeof setTimeout>>();
const dropped = new Set<string>();
let database: Promise<IDBPDatabase<Schema>> | undefined;

/** Whether the last write succeeded: if not, closing the page loses what it shows. */
export const isKept = signal(true);

function db(): Promise<IDBPDatabase<Schema>> {
  database ??= openDB<Schema>("streamer", 1, {
    upgrade(fresh) {
      fresh.createObjectStore("conversations", { keyPath: "id" });
      fresh.createObjectStore("messages", { keyPath: "id" }).createIndex("conversation", "conversation");
    },
    // by the browser, for example when its data are cleared
    terminated: () => (database = undefined),
  });
  return database;
}

export async function load(): Promise<{ conversations: KeptConversation[]; messages: KeptMessage[] }> {
  try {
    const store = await db();
    const [conversations, messages] = await Promise.all([store.getAll("conversations"), store.getAll("messages")]);
    return { conversations, messages };
  } catch {
    isKept.value = false;
    return { conversations: [], messages: [] };
  }
}

export function keepConversation(conversation: Conversation): void {
  if (conversation.messages.value.length === 0 || dropped.has(conversation.id)) return;
  const record = asKeptConversation(conversation);
  channel?.postMessage({ type: "conversation", record } satisfies TabMessage);
  void write((store) => store.put("conversations", record));
}

export function keepMessage(conversation: Conversation, message: Message): void {
  const record = keepQuietly(conversation, message);
  if (!record || record.answer?.status === "sending") return; // without an id it can't be followed
  channel?.postMessage({ type: "message", record } satisfies TabMessage);
}

/** All of them or none; resolves once they are on the disk. */
export function keepAll(conversations: readonly Conversation[]): Promise<void> {
  const whole = conversations.map((conversation) => ({
    record: asKeptConversation(conversation),
    messages: conversation.messages.value.map((message) => asKeptMessage(conversation, message)),
  }));
  for (const { record, messages } of whole) {
    dropped.delete(record.id);
    // it may have been deleted before
    channel?.postMessage({ type: "restored", id: record.id } satisfies TabMessage);
    channel?.postMessage({ type: "conversation", record } satisfies TabMessage);
    for (const message of messages) channel?.postMessage({ type: "message", record: message } satisfies TabMessage);
  }
  return write(async (store) => {
    const all = store.transaction(["conversations", "messages"], "readwrite");
    for (const { record, messages } of whole) {
      void all.objectStore("conversations").put(record);
      for (const message of messages) void all.objectStore("messages").put(message);
    }
    await all.done;
  });
}

/** Write soon, not at every frame of a growing answer. */
export function keepSoon(conversation: Conversation, message: Message): void {
  if (!due.has(message)) due.set(message, setTimeout(() => keepQuietly(conversation, message), EVERY_MS));
}

export function dropMessage(conversation: Conversation, { id }: Message): void {
  channel?.postMessage({ type: "message-dropped", conversation: conversation.id, id } satisfies TabMessage);
  void write((store) => store.delete("messages", id));
}

export function drop(conversation: Conversation): void {
  dropped.add(conversation.id);
  channel?.postMessage({ type: "dropped", id: conversation.id } satisfies TabMessage);
  void write(async (store) => {
    const all = store.transaction(["conversations", "messages"], "readwrite");
    const keys = await all.objectStore("messages").index("conversation").getAllKeys(conversation.id);
    await Promise.all(keys.map((key) => all.objectStore("messages").delete(key)));
    await all.objectStore("conversations").delete(conversation.id);
    await all.done;
  });
}

/** Listen to other tabs. */
export function listen(onTabMessage: (message: TabMessage) => void): void {
  channel?.addEventListener("message", ({ data }: MessageEvent<TabMessage>) => {
    if (data.type === "dropped") dropped.add(data.id);
    if (data.type === "restored") dropped.delete(data.id);
    onTabMessage(data);
  });
}

/** null: it was deleted meanwhile. */
function keepQuietly(conversation: Conversation, message: Message): KeptMessage | null {
  clearTimeout(due.get(message));
  due.delete(message);
  if (dropped.has(conversation.id)) return null;
  const record = asKeptMessage(conversation, message);
  void write((store) => store.put("messages", record));
  return record;
}

async function write(work: (store: IDBPDatabase<Schema>) => Promise<unknown>): Promise<void> {
  try {
    await work(await db());
    isKept.value = true;
  } catch {
    isKept.value = false; // the disk is full, or the browser forbids it
  }
}
