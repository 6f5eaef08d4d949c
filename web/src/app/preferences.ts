/** The user's preferences: kept in this browser, written only when one changes. */

import { computed, effect, signal } from "@preact/signals";
import { recall, remember } from "./storage.ts";

export type Theme = "system" | "light" | "dark";

/** null: the model's own; for maxTokens: up to the context's end; for seed: a new one each time. */
export interface Settings {
  temperature: number | null;
  topP: number | null;
  topK: number | null;
  minP: number | null;
  repetitionPenalty: number | null;
  maxTokens: number | null;
  seed: number | null;
  /** The system prompt that a new chat begins with. */
  system: string;
  /** Functions that the model may call: a JSON list, as it was typed. */
  tools: string;
  /** How many answers a question gets, side by side. */
  answers: number;
}

export const DEFAULTS: Settings = {
  temperature: null,
  topP: null,
  topK: null,
  minP: null,
  repetitionPenalty: null,
  maxTokens: null,
  seed: null,
  system: "",
  tools: "",
  answers: 1,
};

function load<T>(name: string, otherwise: T): T {
  try {
    return (JSON.parse(recall("localStorage", name) ?? "null") as T | null) ?? otherwise;
  } catch {
    return otherwise;
  }
}

const keep = (name: string, value: unknown) => remember("localStorage", name, JSON.stringify(value));

export const settings = signal<Settings>({ ...DEFAULTS, ...load<Partial<Settings>>("streamer.settings", {}) });
export const theme = signal<Theme>(load<Theme>("streamer.theme", "system"));

export function change(part: Partial<Settings>): void {
  settings.value = { ...settings.value, ...part };
  keep("streamer.settings", settings.value);
}

const dark = matchMedia("(prefers-color-scheme: dark)");
const isSystemDark = signal(dark.matches);
dark.addEventListener("change", () => (isSystemDark.value = dark.matches));

/** What is on the screen now. */
export const isDark = computed(() => (theme.value === "system" ? isSystemDark.value : theme.value === "dark"));

export function toggleTheme(): void {
  theme.value = isDark.value ? "light" : "dark";
  keep("streamer.theme", theme.value);
}

effect(() => {
  if (theme.value === "system") delete document.documentElement.dataset["theme"];
  else document.documentElement.dataset["theme"] = theme.value;
});
