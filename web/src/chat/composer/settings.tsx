/** Sampling, length and system prompt of answers. A change applies from the next question on. */

import { signal } from "@preact/signals";
import { useEffect } from "preact/hooks";
import { session } from "../../app/connection.ts";
import { change, DEFAULTS, settings } from "../../app/preferences.ts";
import { Dialog } from "../../ui/dialog.tsx";
import { focusComposer } from "../pane.tsx";
import { defaultOf, RANGES, shownValue, toolsOf, type Range } from "../conversation/sampling.ts";
import { current, setDefaultSystem, setSystem } from "../conversation/store.ts";

export const isSettingsOpen = signal(false);

export function SettingsDialog() {
  const { maxTokens, seed, answers, tools } = settings.value;
  const conversation = current.value;
  const system = conversation.system.value;
  const isDefault = system === settings.value.system;
  const done = (event: Event) => {
    event.preventDefault();
    if (toolsOf(tools)) isSettingsOpen.value = false;
    else showToolsFault();
  };
  return (
    <Dialog title="Settings" open={isSettingsOpen} onClose={focusComposer}>
      <form onSubmit={done}>
        <div class="field">
          <label for="system">System prompt</label>
          <textarea id="system" rows={3} value={system} aria-describedby="system-hint" onInput={(e) => setSystem(conversation, e.currentTarget.value)} />
          <small id="system-hint">Applies to this chat from its next answer on. {isDefault ? "New chats use it too." : "New chats do not use it."}</small>
          {!isDefault && (
            <button class="button small" type="button" onClick={() => setDefaultSystem(system)}>
              Use it for new chats
            </button>
          )}
        </div>
        <div class="fields">
          <div class="field">
            <label for="max-tokens">Maximum tokens</label>
            <input id="max-tokens" type="number" min="1" step="1" placeholder="up to the context length" value={maxTokens ?? ""} onInput={(e) => change({ maxTokens: wholeOf(e.currentTarget.value, 1) })} />
          </div>
          <div class="field">
            <label for="seed">Seed</label>
            <input id="seed" type="number" min="0" step="1" placeholder="random" value={seed ?? ""} onInput={(e) => change({ seed: wholeOf(e.currentTarget.value, 0) })} />
          </div>
        </div>
        <div class="fields">
          {RANGES.map((range) => (
            <Slider key={range.name} range={range} />
          ))}
        </div>
        <Tools text={tools} />
        <div class="row">
          <button class="button" type="button" onClick={() => (change({ ...DEFAULTS, answers }), setDefaultSystem(""), setSystem(conversation, ""))}>
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

/** Where the list is wrong, the settings open at it, and close by Escape alone. */
function Tools({ text }: { text: string }) {
  const isWrong = toolsOf(text) === null;
  useEffect(() => {
    if (isWrong) document.getElementById("tools-hint")?.scrollIntoView({ block: "nearest" });
  }, [isWrong]);
  return (
    <div class="field">
      <label for="tools">Tools</label>
      <textarea id="tools" rows={3} spellcheck={false} autofocus={isWrong} value={text} aria-describedby="tools-hint" aria-invalid={isWrong} placeholder='[{"name": "...", "description": "...", "parameters": {}}]' onInput={(e) => change({ tools: e.currentTarget.value })} />
      <small id="tools-hint" class={isWrong ? "fault" : undefined} role={isWrong ? "alert" : undefined}>
        {isWrong ? "This is not a JSON list of functions with a name each. No tools are sent." : "Functions that the model may call, as a JSON list. You give what they return."}
      </small>
    </div>
  );
}

function showToolsFault(): void {
  document.getElementById("tools")?.focus();
  document.getElementById("tools-hint")?.scrollIntoView({ block: "nearest" });
}

function Slider({ range }: { range: Range }) {
  const { name, label, hint, min, max, step } = range;
  const value = settings.value[name];
  const byDefault = defaultOf(range, session.value);
  return (
    <div class="field">
      <label for={name}>
        <span>{label}</span>
        <output for={name}>{shownValue(range, value, byDefault)}</output>
      </label>
      <input id={name} type="range" min={min} max={max} step={step} value={value ?? byDefault ?? min} aria-describedby={`${name}-hint`} onInput={(e) => change({ [name]: Number(e.currentTarget.value) })} />
      <small id={`${name}-hint`}>{hint}</small>
    </div>
  );
}

function wholeOf(text: string, min: number): number | null {
  const value = parseInt(text, 10);
  return Number.isSafeInteger(value) && value >= min ? value : null;
}
