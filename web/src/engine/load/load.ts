/**
 * A small load that shows the engine at work: readers that share one system prompt, two long
 * answers, and a fork at intervals. Sized by the pool, repeated until it is stopped or its time is
 * over.
 */

import { computed, signal } from "@preact/signals";
import { client, session } from "../../app/connection.ts";
import type { Ask, ResponseStream } from "../../client/index.ts";
import { sizesFor, type Sizes } from "./sizes.ts";

export const LASTS_MS = 60_000;
const FORK_EVERY = 4; // answers of a reader's lane
const SYSTEM =
  "You are the librarian of a small town by the sea. You answer with care and in whole sentences. " +
  "You know the tides, the boats and their crews, the paths along the cliffs, the weather of every month, " +
  "and the stories that the old people tell in winter. When you are asked about a book you say who wrote it " +
  "and why it is worth an evening. When you are asked the way you name the corners and the trees. You never " +
  "guess: what you do not know, you look up. You like short examples, and you end with a question.";
const QUESTIONS = [
  "Which book should I read on a rainy day?",
  "How do I get from the harbour to the lighthouse?",
  "What do the fishermen say about tomorrow's weather?",
  "Tell me a story of the old ferry.",
  "What grows on the cliffs in May?",
];
const LONG = ["Write a long tale about a storm and a lighthouse.", "Describe the whole coast, from north to south."];

export const answers = signal(0);
const live = signal<ReadonlySet<ResponseStream>>(new Set());
const isActive = signal(false);
export const loadFault = signal("");
/** Whether any answer runs or more will start. */
export const isLoading = computed(() => isActive.value || live.value.size > 0);

let timer = 0;

export function startLoad(poolTokens: number): void {
  const sizes = sizesFor(poolTokens, session.value?.context_length ?? poolTokens);
  answers.value = 0;
  loadFault.value = "";
  isActive.value = true;
  timer = setTimeout(() => (isActive.value = false), LASTS_MS);
  QUESTIONS.forEach((_, lane) => read(lane, sizes));
  LONG.forEach((input, i) => ask(`long-${i}`, { input, max_output_tokens: sizes.long }));
}

export function stopLoad(): void {
  clearTimeout(timer);
  isActive.value = false;
  for (const stream of live.value) stream.cancel();
}

/** A reader's next question, and at intervals a fork of its answer. */
function read(lane: number, sizes: Sizes, turn = 0): void {
  const input = QUESTIONS[(lane + turn) % QUESTIONS.length] ?? "";
  const body: Ask = { instructions: SYSTEM.slice(0, sizes.system), input, max_output_tokens: sizes.answer - lane };
  const stream = follow(client.create({ ...body, ignore_eos: true }, { lane: `load-reader-${lane}` }));
  if ((lane + turn) % FORK_EVERY === 0) forkOnce(stream, Math.floor(sizes.answer / 3), sizes);
  void stream.done.then(() => isActive.value && stream.status !== "failed" && read(lane, sizes, turn + 1));
}

function ask(lane: string, body: Ask): void {
  const stream = follow(client.create({ ...body, ignore_eos: true }, { lane: `load-${lane}` }));
  void stream.done.then(() => isActive.value && stream.status !== "failed" && ask(lane, body));
}

/** Fork once the answer is long enough: the same tokens up to there, then another ending. */
function forkOnce(parent: ResponseStream, at: number, sizes: Sizes): void {
  const off = parent.on("delta", () => {
    if (parent.tokens <= at || !parent.id || !isActive.value) return;
    off();
    follow(client.fork(parent.id, { at }, { max_output_tokens: sizes.answer, ignore_eos: true }));
  });
}

function follow(stream: ResponseStream): ResponseStream {
  live.value = new Set([...live.value, stream]);
  void stream.done.then(() => {
    live.value = new Set([...live.value].filter((other) => other !== stream));
    if (stream.status === "completed" || stream.status === "incomplete") answers.value += 1;
    if (!stream.error) return;
    loadFault.value = stream.error.message;
    isActive.value = false;
  });
  return stream;
}
