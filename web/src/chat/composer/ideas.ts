/** Suggested questions, by the model that is served. */

/** The bundled model knows only this engine and short stories. */
const DEMO = ["What is PagedAttention?", "Tell me a short story about a fox.", "How does continuous batching work?"];
/** The fake model counts, whatever the question. */
const FAKE = ["How far can you count?"];
const ANY = ["Explain how a rainbow forms, in three sentences.", "Write a short poem about the first snow.", "What should I think of when I choose a bicycle?"];

const OWN = new Map([
  ["streamer-demo", DEMO],
  ["fake", FAKE],
]);

export function ideasFor(model: string | undefined): readonly string[] {
  if (model === undefined) return [];
  return OWN.get(model) ?? ANY;
}
