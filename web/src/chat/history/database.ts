/**
 * Database: conversations in this browser's IndexedDB; every change is reported to its other tabs.
 *
 * A message is a record of its own, so that two tabs add to one conversation without loss. Nothing
 * waits for a write: what is not written when the page is left, the tab's next page has from
 * unwritten.ts. Without a database (private mode, a full disk) the page works while it is open, and
 * shows that nothing is stored.
 */

import { signal } from "@preact/signals";
import { openDB, type DBSchema, type IDBPDatabase } from "idb";
import { asKeptConversation, asKeptMessage, type KeptConversation, type KeptMessage } from "./records.ts";
import { idOf, isOutdated, isUnanswered, leaveBehind, takeOver, withChanges, type Change, type Kept } from "./unwritten.ts";
import type { Conversation, Message } from "../conversation/conversation.ts";

interface Schema extends DBSchema {
  conversations: { key: string; value: KeptConversation };
  messages: { key: string; value: KeptMessage; indexes: { conversation: string } };
}

/** What a tab reports to the others. */
export type TabMessage = Change | { type: "restored"; id: string };
type Store = IDBPDatabase<Schema>;

const EVERY_MS = 1000; // between two writes of an answer that grows
const channel = typeof BroadcastChannel === "undefined" ? null : new BroadcastChannel("streamer");
const due = new Map<Message, { conversation: Conversation; timer: ReturnType<typeof setTimeout> }>();
/** Changes that are not on the disk, by what they change. */
const unwritten = new Map<string, Change>();
const dropped = new Set<string>();
let database: Promise<Store> | undefined;

/** Whether the last write succeeded: if not, closing the page loses what it shows. */
export const isKept = signal(true);

function db(): Promise<Store> {
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

/** Everything stored, and the ids of those answers among it that have to be requested again. */
export async function load(): Promise<Kept & { unanswered: ReadonlySet<string> }> {
  const left = takeOver();
  for (const change of left) unwritten.set(idOf(change), change);
  const kept = await read();
  for (const change of left) if (isOutdated(change, kept)) unwritten.delete(idOf(change));
  const changes = left.filter((change) => unwritten.get(idOf(change)) === change);
  for (const change of changes) void apply(change);
  return { ...withChanges(kept, changes), unanswered: new Set(changes.filter(isUnanswered).map(idOf)) };
}

async function read(): Promise<Kept> {
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
  report({ type: "conversation", record: asKeptConversation(conversation) });
}

export function keepMessage(conversation: Conversation, message: Message): void {
  const change = keepQuietly(conversation, message);
  if (change && !isUnanswered(change)) channel?.postMessage(change satisfies TabMessage);
}

/** The page is left: writes under way may be aborted. */
export function leave(): void {
  for (const [message, { conversation }] of due) keepQuietly(conversation, message);
  leaveBehind(unwritten.values());
}

/** All of them or none; resolves once they are on the disk. */
export async function keepAll(conversations: readonly Conversation[]): Promise<void> {
  const whole = conversations.map((conversation) => ({
    record: asKeptConversation(conversation),
    messages: conversation.messages.value.map((message) => asKeptMessage(conversation, message)),
  }));
  for (const { record, messages } of whole) {
    dropped.delete(record.id);
    unwritten.delete(record.id);
    // it may have been deleted before
    channel?.postMessage({ type: "restored", id: record.id } satisfies TabMessage);
    channel?.postMessage({ type: "conversation", record } satisfies TabMessage);
    for (const message of messages) channel?.postMessage({ type: "message", record: message } satisfies TabMessage);
  }
  await write(async (store) => {
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
  if (!due.has(message)) due.set(message, { conversation, timer: setTimeout(() => keepQuietly(conversation, message), EVERY_MS) });
}

export function dropMessage(conversation: Conversation, { id }: Message): void {
  report({ type: "message-dropped", conversation: conversation.id, id });
}

export function drop({ id }: Conversation): void {
  forget(id);
  report({ type: "dropped", id });
}

/** Listen to other tabs. */
export function listen(onTabMessage: (message: TabMessage) => void): void {
  channel?.addEventListener("message", ({ data }: MessageEvent<TabMessage>) => {
    if (data.type === "dropped") forget(data.id);
    if (data.type === "restored") dropped.delete(data.id);
    onTabMessage(data);
  });
}

function forget(conversation: string): void {
  dropped.add(conversation);
  for (const change of unwritten.values()) {
    const isOfIt = change.type === "message" ? change.record.conversation === conversation : idOf(change) === conversation;
    if (isOfIt) unwritten.delete(idOf(change));
  }
}

/** null: it was deleted meanwhile. */
function keepQuietly(conversation: Conversation, message: Message): Change | null {
  clearTimeout(due.get(message)?.timer);
  due.delete(message);
  if (dropped.has(conversation.id)) return null;
  const change: Change = { type: "message", record: asKeptMessage(conversation, message) };
  void apply(change);
  return change;
}

function report(change: Change): void {
  channel?.postMessage(change satisfies TabMessage);
  void apply(change);
}

async function apply(change: Change): Promise<void> {
  const id = idOf(change);
  unwritten.set(id, change);
  const isWritten = await write((store) => changeIn(store, change));
  // an answer that has no id yet is left to the next page, which requests it again
  if (isWritten && unwritten.get(id) === change && !isUnanswered(change)) unwritten.delete(id);
}

async function changeIn(store: Store, change: Change): Promise<unknown> {
  if (change.type === "conversation") return store.put("conversations", change.record);
  if (change.type === "message") return store.put("messages", change.record);
  if (change.type === "message-dropped") return store.delete("messages", change.id);
  const all = store.transaction(["conversations", "messages"], "readwrite");
  const keys = await all.objectStore("messages").index("conversation").getAllKeys(change.id);
  await Promise.all(keys.map((key) => all.objectStore("messages").delete(key)));
  await all.objectStore("conversations").delete(change.id);
  return all.done;
}

/** Returns whether it succeeded. */
async function write(work: (store: Store) => Promise<unknown>): Promise<boolean> {
  try {
    await work(await db());
    isKept.value = true;
  } catch {
    isKept.value = false; // the disk is full, or the browser forbids it
  }
  return isKept.value;
}
