/** Sampling settings: their names and ranges, and which of them are sent. */

import type { Settings } from "../../app/preferences.ts";
import type { Ask, GivenToolOfResponse, Session } from "../../client/index.ts";

/** A setting with a slider; null in Settings means the model's own. */
export interface Range {
  name: "temperature" | "topP" | "topK" | "minP" | "repetitionPenalty";
  label: string;
  hint: string;
  min: number;
  max: number;
  step: number;
  /** The server's name of it. */
  field: string;
}

export const RANGES: readonly Range[] = [
  { name: "temperature", label: "Temperature", hint: "0 always picks the most likely token; above 1, answers become more random.", min: 0, max: 2, step: 0.05, field: "temperature" },
  { name: "topP", label: "Top p", hint: "Sample only from the most likely tokens whose probabilities add up to this.", min: 0.05, max: 1, step: 0.05, field: "top_p" },
  { name: "topK", label: "Top k", hint: "Sample only from this many of the most likely tokens; 0 means all.", min: 0, max: 200, step: 1, field: "top_k" },
  { name: "minP", label: "Min p", hint: "Sample only from tokens at least this likely, relative to the most likely one.", min: 0, max: 0.5, step: 0.01, field: "min_p" },
  { name: "repetitionPenalty", label: "Repetition penalty", hint: "Above 1, tokens that already occurred become less likely.", min: 0.8, max: 1.5, step: 0.01, field: "repetition_penalty" },
];

/** The model's own value, which requests have that name none; null: not known before there is a connection. */
export function defaultOf({ field }: Range, session: Session | null): number | null {
  const value = session?.sampling_defaults[field];
  return value === undefined ? null : Math.max(0, value); // top k's -1 means all, as 0 does
}

/** What stands beside a setting's name. */
export function shownValue(range: Range, value: number | null, byDefault: number | null): string {
  const text = (number: number) => number.toFixed(range.step < 1 ? 2 : 0);
  if (value !== null) return text(value);
  return byDefault === null ? "model default" : `default ${text(byDefault)}`;
}

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
