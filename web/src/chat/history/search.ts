/** Search: which chat has the words, which of its messages, and where on the screen. */

import { computed, signal } from "@preact/signals";
import type { Conversation, Message } from "../conversation/conversation.ts";
import { choose, conversations, open } from "../conversation/store.ts";

/** The text searched for in the history. */
export const query = signal("");
/** The message that the last search result led to. */
export const hit = signal<{ message: Message; words: readonly string[] } | null>(null);

const wordsOf = (text: string): string[] => text.toLowerCase().split(/\s+/).filter(Boolean);
const textOf = ({ answer, results, text }: Message): string => answer?.text.peek() ?? results?.map(({ output }) => output).join("\n") ?? text;

export const found = computed(() => {
  const words = wordsOf(query.value);
  const all = conversations.value.filter((conversation) => conversation.messages.value.length > 0);
  return words.length === 0 ? all : all.filter((conversation) => has(conversation, words));
});

function has(conversation: Conversation, words: string[]): boolean {
  const all = [conversation.title.value, ...conversation.messages.value.map(textOf)].join("\n").toLowerCase();
  return words.every((word) => all.includes(word));
}

/**
 * The message with most of the words; of equals one on the shown path, then the first.
 * null: only the title has them.
 */
export function messageWith(conversation: Conversation, words: readonly string[]): Message | null {
  const path = new Set(conversation.path.value);
  let best: Message | null = null;
  let bestScore = 0;
  for (const message of conversation.messages.value) {
    const text = textOf(message).toLowerCase();
    const count = words.filter((word) => text.includes(word)).length;
    const score = count > 0 ? count + (path.has(message) ? 0.5 : 0) : 0;
    if (score > bestScore) [best, bestScore] = [message, score];
  }
  return best;
}

export function openFound(conversation: Conversation): void {
  const words = wordsOf(query.value);
  const message = words.length > 0 ? messageWith(conversation, words) : null;
  if (message && !conversation.path.value.includes(message)) choose(conversation, message);
  hit.value = message && { message, words };
  open(conversation);
}

/** The ranges of the words in an element's text. */
export function rangesOf(element: Element, words: readonly string[]): Range[] {
  const pattern = new RegExp(words.map((word) => word.replace(/[\\^$.*+?()[\]{}|]/g, "\\$&")).join("|"), "giu");
  const texts = document.createTreeWalker(element, NodeFilter.SHOW_TEXT);
  const ranges: Range[] = [];
  while (texts.nextNode()) {
    const node = texts.currentNode as Text;
    for (const { index, 0: word } of node.data.matchAll(pattern)) {
      const range = document.createRange();
      range.setStart(node, index);
      range.setEnd(node, index + word.length);
      ranges.push(range);
    }
  }
  return ranges;
}
