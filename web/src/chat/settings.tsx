/** How answers are made: temperature, length, system prompt. A change holds from the next question on. */

import { signal } from "@preact/signals";
import { change, DEFAULTS, settings } from "../app/preferences.ts";
import { Dialog } from "../ui/dialog.tsx";
import { focusComposer } from "./pane.tsx";

export const isSettingsOpen = signal(false);

export function SettingsDialog() {
  const { temperature, maxTokens, system } = settings.value;
  const done = (event: Event) => {
    event.preventDefault();
    isSettingsOpen.value = false;
  };
  const setLimit = (text: string) => {
    const limit = parseInt(text, 10);
    change({ maxTokens: Number.isFinite(limit) && limit > 0 ? limit : null });
  };
  return (
    <Dialog title="Settings" open={isSettingsOpen} onClose={focusComposer}>
      <form onSubmit={done}>
        <div class="field">
          <label for="temperature">
            <span>Temperature</span>
            <output for="temperature">{temperature === null ? "the model's own" : temperature.toFixed(2)}</output>
          </label>
          <input id="temperature" type="range" min="0" max="2" step="0.05" value={temperature ?? 1} onInput={(e) => change({ temperature: Number(e.currentTarget.value) })} />
          <small>0 always takes the likeliest token.</small>
        </div>
        <div class="field">
          <label for="max-tokens">Longest answer, in tokens</label>
          <input id="max-tokens" type="number" min="1" step="1" placeholder="as long as the context allows" value={maxTokens ?? ""} onInput={(e) => setLimit(e.currentTarget.value)} />
        </div>
        <div class="field">
          <label for="system">System prompt</label>
          <textarea id="system" rows={3} value={system} onInput={(e) => change({ system: e.currentTarget.value })} />
        </div>
        <div class="row">
          <button class="button" type="button" onClick={() => change(DEFAULTS)}>
            Reset
          </button>
          <button class="button primary" type="submit">
            Done
          </button>
        </div>
      </form>
    </Dialog>
  );
}
