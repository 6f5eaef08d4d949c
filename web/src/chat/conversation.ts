/**
 * Conversation: messages as a tree, and the path through it that is shown.
 *
 * Every message knows the one it follows, so another answer or an edited question is a sibling;
 * `leaf` says which path is shown.
 */

import { computed, signal } from "@preact/signals";
import type { InputItem } from "../client/index.ts";
import type { Answer } from "./answer.ts";

export interface Message {
  readonly id: string;
  readonly role: "user" | "assistant";
  readonly parent: Message | null;
  /** A question's text; an answer's is in `answer`. */
  readonly text: string;
  readonly answer: Answer | null;
}

export class Conversation {
  readonly id = crypto.randomUUID();
  readonly messages = signal<readonly Message[]>([]);
  readonly leaf = signal<Message | null>(null);
  readonly path = computed(() => pathTo(this.leaf.value));
  readonly title = computed(() => this.messages.value[0]?.text.slice(0, 80) ?? "New chat");

  add(message: Omit<Message, "id">): Message {
    const added = { ...message, id: crypto.randomUUID() };
    this.messages.value = [...this.messages.value, added];
    this.leaf.value = added;
    return added;
  }
}

function pathTo(leaf: Message | null): Message[] {
  const path: Message[] = [];
  for (let at = leaf; at; at = at.parent) path.push(at);
  return path.reverse();
}

/** What is sent for a question: everything before it, less questions that nothing answered. */
export function inputFor(question: Message): InputItem[] {
  const path = pathTo(question);
  const items: InputItem[] = [];
  path.forEach((message, i) => {
    const next = path[i + 1]?.answer;
    if (message.answer) {
      if (message.answer.text.value) items.push({ role: "assistant", content: message.answer.text.value });
    } else if (!next || next.text.value) {
      items.push({ role: "user", content: message.text });
    }
  });
  return items;
}
