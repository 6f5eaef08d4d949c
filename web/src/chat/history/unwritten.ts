/**
 * Unwritten: changes that the database did not have yet when the page was left, for the same tab's
 * next page. A reload aborts the writes that are under way, and an answer that grows is written at
 * intervals; sessionStorage takes the rest at once.
 */

import { recall, remember } from "../../app/storage.ts";
import { hasEnded } from "../conversation/answer.ts";
import type { KeptConversation, KeptMessage } from "./records.ts";

export type Change =
  | { type: "conversation"; record: KeptConversation }
  | { type: "message"; record: KeptMessage }
  | { type: "message-dropped"; conversation: string; id: string }
  | { type: "dropped"; id: string };

export interface Kept {
  conversations: KeptConversation[];
  messages: KeptMessage[];
}

const UNWRITTEN = "streamer.unwritten";

/** What it changes; conversations and messages have no id in common. */
export const idOf = (change: Change): string => ("record" in change ? change.record.id : change.id);

/** Whether the server may never have had the request, or its id has not come: it can't be followed. */
export const isUnanswered = (change: Change): boolean => change.type === "message" && change.record.answer !== null && change.record.answer.responseId === null && !hasEnded(change.record.answer.status);

export function leaveBehind(changes: Iterable<Change>): void {
  const left = [...changes];
  remember("sessionStorage", UNWRITTEN, left.length > 0 ? JSON.stringify(left) : null);
}

export function takeOver(): Change[] {
  const left = recall("sessionStorage", UNWRITTEN);
  remember("sessionStorage", UNWRITTEN, null);
  try {
    return JSON.parse(left ?? "[]") as Change[];
  } catch {
    return [];
  }
}

/** Another tab followed the answer to its end meanwhile. */
export function isOutdated(change: Change, kept: Kept): boolean {
  if (change.type !== "message") return false;
  const written = kept.messages.find(({ id }) => id === change.record.id)?.answer;
  const left = change.record.answer;
  return Boolean(written && left && hasEnded(written.status) && (left.responseId ?? written.responseId) === written.responseId);
}

/** What the database will have once these changes are written. */
export function withChanges(kept: Kept, changes: readonly Change[]): Kept {
  const conversations = new Map(kept.conversations.map((record) => [record.id, record]));
  const messages = new Map(kept.messages.map((record) => [record.id, record]));
  for (const change of changes) {
    if (change.type === "conversation") conversations.set(change.record.id, change.record);
    else if (change.type === "message") messages.set(change.record.id, change.record);
    else if (change.type === "message-dropped") messages.delete(change.id);
    else conversations.delete(change.id); // a message without its conversation is not read
  }
  return { conversations: [...conversations.values()], messages: [...messages.values()] };
}
