/**
 * Conversation: messages as a tree, and the path through it that is shown.
 *
 * Every message knows the one it follows, so another answer or an edited question is a sibling;
 * `leaf` says which path is shown, `beside` which answers stand side by side at its end.
 */

import { computed, signal } from "@preact/signals";
import type { InputItem, Piece } from "../../client/index.ts";
import type { Answer } from "./answer.ts";

export interface Message {
  readonly id: string;
  readonly role: "user" | "assistant";
  readonly parent: Message | null;
  /** A question's text; an answer's is in `answer`. */
  readonly text: string;
  readonly answer: Answer | null;
  /** What called tools returned, in place of a question's text. */
  readonly results?: readonly CallResult[];
  /** Unix milliseconds. */
  readonly created: number;
}

export interface CallResult {
  callId: string;
  name: string;
  output: string;
}

/** A question that is being edited, and its text so far. */
export interface Edit {
  message: Message;
  text: string;
}

export class Conversation {
  readonly id: string;
  readonly created: number;
  /** The title the user gave it; null: the first question. */
  readonly name = signal<string | null>(null);
  readonly messages = signal<readonly Message[]>([]);
  readonly leaf = signal<Message | null>(null);
  readonly beside = signal<readonly Message[]>([]);
  /** The system prompt of its answers. */
  readonly system = signal("");
  /** Typed and unsent text: see drafts.ts. */
  readonly draft = signal("");
  readonly edit = signal<Edit | null>(null);
  readonly path = computed(() => pathTo(this.leaf.value));
  /** The end of the path: one answer, or several side by side. */
  readonly ends = computed(() => {
    const leaf = this.leaf.value;
    const beside = this.beside.value;
    if (leaf && beside.length > 1 && beside.includes(leaf)) return beside;
    return leaf ? [leaf] : [];
  });
  readonly title = computed(() => this.name.value ?? this.messages.value[0]?.text.trim().slice(0, 80) ?? "New chat");
  /** Answers that are shown and still stream. */
  readonly live = computed(() => this.#shown().filter((answer) => answer.isLive.value));
  readonly isLive = computed(() => this.messages.value.some((message) => message.answer?.isLive.value));

  constructor(id: string = newId(), created: number = Date.now()) {
    this.id = id;
    this.created = created;
  }

  add(message: Omit<Message, "id" | "created">): Message {
    const last = this.messages.value.at(-1)?.created ?? 0;
    // the sort key
    const added = { ...message, id: newId(), created: Math.max(Date.now(), last + 1) };
    this.messages.value = [...this.messages.value, added];
    this.leaf.value = added;
    return added;
  }

  /** Remove a message that nothing follows; a sibling is shown instead, or else its parent. */
  remove(message: Message): void {
    this.messages.value = this.messages.value.filter((other) => other !== message);
    if (this.leaf.value !== message) return;
    const other = siblings(this.messages.value, message).at(-1);
    this.leaf.value = other ? latestBelow(this.messages.value, other) : message.parent;
  }

  #shown(): Answer[] {
    return [...this.path.value, ...this.ends.value].flatMap((message) => message.answer ?? []);
  }
}

/** randomUUID exists only over HTTPS and on this machine; the page also works over plain HTTP. */
export function newId(): string {
  const bytes = crypto.getRandomValues(new Uint8Array(16));
  return Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");
}

export function pathTo(leaf: Message | null): Message[] {
  const path: Message[] = [];
  for (let at = leaf; at; at = at.parent) path.push(at);
  return path.reverse();
}

/** This message and its siblings, oldest first. */
export function siblings(all: readonly Message[], message: Message): Message[] {
  return all.filter((other) => other.parent === message.parent && other.role === message.role);
}

/** The end of the latest path below a message. */
export function latestBelow(all: readonly Message[], message: Message): Message {
  let leaf = message;
  for (;;) {
    const next = all.filter((other) => other.parent === leaf).at(-1);
    if (!next) return leaf;
    leaf = next;
  }
}

/**
 * The input sent for a question: everything before it, less questions whose answer is empty.
 * Consecutive questions, as after waiting, are joined into one turn.
 */
export function inputFor(question: Message): InputItem[] {
  const path = pathTo(question);
  const items: InputItem[] = [];
  path.forEach((message, i) => {
    const next = path[i + 1]?.answer;
    if (message.answer) items.push(...message.answer.pieces.value.flatMap(itemOf));
    else if (next && next.pieces.value.length === 0) return;
    else if (message.results) items.push(...message.results.map(({ callId, output }): InputItem => ({ type: "function_call_output", call_id: callId, output })));
    else {
      const before = items.at(-1);
      if (before?.role === "user") before.content = `${String(before.content)}\n\n${message.text}`;
      else items.push({ role: "user", content: message.text });
    }
  });
  return items;
}

/** A piece of an earlier answer; the chat template decides what of it the model reads again. */
function itemOf({ kind, text, name = "", callId = "" }: Piece): InputItem[] {
  if (kind === "call") return [{ type: "function_call", call_id: callId, name, arguments: text }];
  if (!text) return [];
  return kind === "text" ? [{ role: "assistant", content: text }] : [{ type: "reasoning", content: [{ type: "reasoning_text", text }] }];
}
