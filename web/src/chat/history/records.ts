/**
 * Conversations as records: for the database, for other tabs and for files. No DOM, no database.
 */

import { Answer, hasEnded, type KeptAnswer } from "../conversation/answer.ts";
import { Conversation, type CallResult, type Message } from "../conversation/conversation.ts";

export interface KeptConversation {
  id: string;
  created: number;
  name: string | null;
  leaf: string | null;
  beside: string[];
  /** Absent in records from before each chat had its own. */
  system?: string;
}

export interface KeptMessage {
  id: string;
  conversation: string;
  created: number;
  role: "user" | "assistant";
  parent: string | null;
  text: string;
  answer: KeptAnswer | null;
  results?: readonly CallResult[];
}

/** A file of exported chats. */
export interface Exported {
  format: "streamer.chats";
  version: 1;
  conversations: (KeptConversation & { messages: KeptMessage[] })[];
}

export function asKeptConversation(conversation: Conversation): KeptConversation {
  return {
    id: conversation.id,
    created: conversation.created,
    name: conversation.name.value,
    leaf: conversation.leaf.value?.id ?? null,
    beside: conversation.beside.value.map((message) => message.id),
    system: conversation.system.value,
  };
}

export function asKeptMessage(conversation: Conversation, message: Message): KeptMessage {
  const { id, created, role, text, results } = message;
  const answer = message.answer?.keep() ?? null;
  return { id, conversation: conversation.id, created, role, parent: message.parent?.id ?? null, text, answer, ...(results && { results }) };
}

/** Rebuild the tree. A message without its parent is left out, with what follows it. */
export function toConversation(kept: KeptConversation, messages: readonly KeptMessage[]): Conversation {
  const conversation = new Conversation(kept.id, kept.created);
  for (const record of [...messages].sort((a, b) => a.created - b.created)) addMessage(conversation, record);
  arrange(conversation, kept);
  return conversation;
}

/** Put a record into the tree; null: it is already there, or its parent is missing. */
export function addMessage(conversation: Conversation, record: KeptMessage): Message | null {
  const all = conversation.messages.value;
  const parent = record.parent === null ? null : all.find((message) => message.id === record.parent);
  if (parent === undefined || all.some((message) => message.id === record.id)) return null;
  const { id, created, role, text, results } = record;
  const message: Message = { id, created, role, text, parent, answer: record.answer ? Answer.of(record.answer) : null, ...(results && { results }) };
  conversation.messages.value = [...all, message];
  return message;
}

/** Show the path that the record has; where it names no message, the latest. */
export function arrange(conversation: Conversation, kept: KeptConversation): void {
  const all = conversation.messages.value;
  const find = (id: string) => all.find((message) => message.id === id);
  conversation.name.value = kept.name;
  conversation.system.value = kept.system ?? "";
  conversation.leaf.value = (kept.leaf === null ? undefined : find(kept.leaf)) ?? all.at(-1) ?? null;
  conversation.beside.value = kept.beside.flatMap((id) => find(id) ?? []);
}

export function toFile(conversations: readonly Conversation[]): Exported {
  const all = conversations.map((conversation) => ({
    ...asKeptConversation(conversation),
    messages: conversation.messages.value.map((message) => asKeptMessage(conversation, message)),
  }));
  return { format: "streamer.chats", version: 1, conversations: all };
}

/** The chats of a file, under their ids there; an Error with a message if it is not an export. */
export function fromFile(text: string): Conversation[] {
  return parse(text).conversations.map((kept) => {
    const messages = kept.messages.map((message) => ({ ...message, conversation: kept.id, answer: message.answer && asEnded(message.answer) }));
    return toConversation(kept, messages);
  });
}

/** Add the messages of `other`, the same chat, that `own` lacks; returns their number. */
export function merge(own: Conversation, other: Conversation): number {
  const before = own.messages.value.length;
  for (const message of other.messages.value) addMessage(own, asKeptMessage(own, message));
  return own.messages.value.length - before;
}

/** An answer that was live at export counts as ended: another browser may lack the key for it. */
function asEnded(answer: KeptAnswer): KeptAnswer {
  return { ...answer, responseId: null, status: hasEnded(answer.status) ? answer.status : "cancelled" };
}

function parse(text: string): Exported {
  let file: unknown;
  try {
    file = JSON.parse(text);
  } catch {
    throw new Error("This file is not JSON.");
  }
  if (!isExported(file)) throw new Error("This file contains no Streamer chats.");
  return file;
}

const isId = (value: unknown): value is string => typeof value === "string" && /^[\w-]{1,64}$/.test(value);
const isObject = (value: unknown): value is Record<string, unknown> => typeof value === "object" && value !== null && !Array.isArray(value);
const isTextOrNull = (value: unknown): value is string | null => value === null || typeof value === "string";

const isListOf = (value: unknown, texts: readonly string[]): boolean => Array.isArray(value) && value.every((one) => isObject(one) && texts.every((name) => typeof one[name] === "string"));

function isExported(file: unknown): file is Exported {
  if (!isObject(file) || file["format"] !== "streamer.chats" || file["version"] !== 1) return false;
  const all = file["conversations"];
  return Array.isArray(all) && all.every(isConversation);
}

function isConversation(value: unknown): boolean {
  if (!isObject(value) || !isId(value["id"]) || typeof value["created"] !== "number" || !isTextOrNull(value["name"]) || !isTextOrNull(value["leaf"])) return false;
  const { beside, messages, system } = value;
  if (system !== undefined && typeof system !== "string") return false;
  if (!Array.isArray(beside) || !beside.every((id) => typeof id === "string")) return false;
  return Array.isArray(messages) && messages.every(isMessage);
}

function isMessage(value: unknown): boolean {
  if (!isObject(value) || !isId(value["id"]) || !isTextOrNull(value["parent"])) return false;
  if (typeof value["created"] !== "number" || typeof value["text"] !== "string") return false;
  if (!isListOf(value["results"] ?? [], ["callId", "name", "output"])) return false;
  return value["role"] === "user" ? value["answer"] === null : value["role"] === "assistant" && isAnswer(value["answer"]);
}

function isAnswer(value: unknown): boolean {
  if (!isObject(value) || typeof value["text"] !== "string" || typeof value["status"] !== "string") return false;
  const { figures, origin, fault, pieces = [] } = value;
  if (!isListOf(pieces, ["kind", "text"])) return false;
  if (!isObject(figures) || typeof figures["tokens"] !== "number" || typeof figures["tokensPerS"] !== "number") return false;
  if (fault !== null && (!isObject(fault) || typeof fault["message"] !== "string")) return false;
  return isObject(origin) && isObject(origin["ask"]) && (origin["fork"] === null || isObject(origin["fork"]));
}
