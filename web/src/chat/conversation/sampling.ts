/** Sampling settings: their names and ranges, and which of them are sent. */

import type { Settings } from "../../app/preferences.ts";
import type { Ask, GivenToolOfResponse } from "../../client/index.ts";

/** A setting with a slider; null in Settings means the model's own. */
export interface Range {
  name: "temperature" | "topP" | "topK" | "minP" | "repetitionPenalty";
  label: string;
  hint: string;
  min: number;
  max: number;
  step: number;
  /** Where the slider stands while the model's own value is used. */
  rest: number;
}

export const RANGES: readonly Range[] = [
  { name: "temperature", label: "Temperature", hint: "0 always picks the most likely token; above 1, answers become more random.", min: 0, max: 2, step: 0.05, rest: 1 },
  { name: "topP", label: "Top p", hint: "Sample only from the most likely tokens whose probabilities add up to this.", min: 0.05, max: 1, step: 0.05, rest: 1 },
  { name: "topK", label: "Top k", hint: "Sample only from this many of the most likely tokens; 0 means all.", min: 0, max: 200, step: 1, rest: 0 },
  { name: "minP", label: "Min p", hint: "Sample only from tokens at least this likely, relative to the most likely one.", min: 0, max: 0.5, step: 0.01, rest: 0 },
  { name: "repetitionPenalty", label: "Repetition penalty", hint: "Above 1, tokens that already occurred become less likely.", min: 0.8, max: 1.5, step: 0.01, rest: 1 },
];

/** The functions of the field for tools, a JSON list; null: it is not one. */
export function toolsOf(text: string): GivenToolOfResponse[] | null {
  if (!text.trim()) return [];
  let given: unknown;
  try {
    given = JSON.parse(text);
  } catch {
    return null;
  }
  const isTool = (one: unknown): one is GivenToolOfResponse => typeof one === "object" && one !== null && typeof (one as { name?: unknown }).name === "string";
  return Array.isArray(given) && given.every(isTool) ? given.map((tool) => ({ ...tool, type: "function" })) : null;
}

export function askOf(settings: Settings, system: string): Ask {
  const { temperature, topP, topK, minP, repetitionPenalty, maxTokens, seed } = settings;
  const ask: Ask = {};
  if (temperature !== null) ask.temperature = temperature;
  if (topP !== null) ask.top_p = topP;
  if (topK !== null) ask.top_k = topK;
  if (minP !== null) ask.min_p = minP;
  if (repetitionPenalty !== null) ask.repetition_penalty = repetitionPenalty;
  if (maxTokens !== null) ask.max_output_tokens = maxTokens;
  if (seed !== null) ask.seed = seed;
  if (system.trim()) ask.instructions = system;
  const tools = toolsOf(settings.tools);
  if (tools?.length) ask.tools = tools;
  return ask;
}
