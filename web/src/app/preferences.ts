/** What the reader chose: kept in this browser, written only when it is changed. */

import { effect, signal } from "@preact/signals";

export type Theme = "system" | "light" | "dark";

/** null: the model's own; for maxTokens: as many as the context allows; for seed: another each time. */
export interface Settings {
  temperature: number | null;
  topP: number | null;
  topK: number | null;
  minP: number | null;
  repetitionPenalty: number | null;
  maxTokens: number | null;
  seed: number | null;
  system: string;
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
  answers: 1,
};

function load<T>(name: string, otherwise: T): T {
  try {
    const kept = localStorage.getItem(name);
    return kept === null ? otherwise : (JSON.parse(kept) as T);
  } catch {
    return otherwise;
  }
}

function keep(name: string, value: unknown): void {
  try {
    localStorage.setItem(name, JSON.stringify(value));
  } catch {
    // private mode
  }
}

export const settings = signal<Settings>({ ...DEFAULTS, ...load<Partial<Settings>>("streamer.settings", {}) });
export const theme = signal<Theme>(load<Theme>("streamer.theme", "system"));

export function change(part: Partial<Settings>): void {
  settings.value = { ...settings.value, ...part };
  keep("streamer.settings", settings.value);
}

const dark = matchMedia("(prefers-color-scheme: dark)");

/** What is on the screen now. */
export function isDark(): boolean {
  return theme.value === "system" ? dark.matches : theme.value === "dark";
}

export function toggleTheme(): void {
  theme.value = isDark() ? "light" : "dark";
  keep("streamer.theme", theme.value);
}

effect(() => {
  if (theme.value === "system") delete document.documentElement.dataset["theme"];
  else document.documentElement.dataset["theme"] = theme.value;
});
