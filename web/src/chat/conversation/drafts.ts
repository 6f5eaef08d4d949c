/**
 * Drafts: each chat's typed and unsent text. Stored in this browser at each key press, so that a
 * reload loses nothing; a new chat's draft is stored for this tab only, or every new tab would
 * begin with it.
 */

import { recall, remember, type Store } from "../../app/storage.ts";
import type { Conversation, Message } from "./conversation.ts";

interface KeptDraft {
  text: string;
  edit: { id: string; text: string } | null;
  /** A chat with messages stores its system prompt with them. */
  system: string;
}

function placeOf(conversation: Conversation): [Store, string] {
  return conversation.messages.value.length > 0 ? ["localStorage", `streamer.draft.${conversation.id}`] : ["sessionStorage", "streamer.draft"];
}

/** The field's text. */
export const typed = (conversation: Conversation): string => conversation.edit.value?.text ?? conversation.draft.value;

export function type(conversation: Conversation, text: string): void {
  const edit = conversation.edit.value;
  if (edit) conversation.edit.value = { ...edit, text };
  else conversation.draft.value = text;
  keepDraft(conversation);
}

export function beginEdit(conversation: Conversation, message: Message): void {
  conversation.edit.value = { message, text: message.text };
  keepDraft(conversation);
}

/** End the edit: the field shows the draft again. */
export function endEdit(conversation: Conversation): void {
  conversation.edit.value = null;
  keepDraft(conversation);
}

export function keepDraft(conversation: Conversation): void {
  const { draft, edit, system } = conversation;
  const isBlank = conversation.messages.value.length === 0;
  const kept: KeptDraft = {
    text: draft.value,
    edit: edit.value && { id: edit.value.message.id, text: edit.value.text },
    system: isBlank ? system.value : "",
  };
  const isEmpty = !kept.text && !kept.edit && !kept.system;
  remember(...placeOf(conversation), isEmpty ? null : JSON.stringify(kept));
}

export function dropDraft(conversation: Conversation): void {
  remember(...placeOf(conversation), null);
}

export function restoreDraft(conversation: Conversation): void {
  const kept = read(recall(...placeOf(conversation)));
  if (!kept) return;
  const { edit } = kept;
  const message = edit && conversation.messages.value.find(({ id }) => id === edit.id);
  conversation.draft.value = kept.text;
  conversation.edit.value = edit && message ? { message, text: edit.text } : null;
  if (kept.system) conversation.system.value = kept.system;
}

function read(text: string | null): KeptDraft | null {
  try {
    return JSON.parse(text ?? "null") as KeptDraft | null;
  } catch {
    return null;
  }
}
