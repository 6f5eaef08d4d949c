/** Pause, slow motion, back to live, and a slider over the buffer. */

import { Pause, Play } from "../icons.tsx";
import { mode, numSnapshots, playback, shown, steer } from "./store.ts";

const SPEEDS: [number, string, string][] = [
  [1, "1×", "Original speed"],
  [1 / 4, "¼×", "A quarter of the speed"],
  [1 / 16, "1⁄16×", "A sixteenth of the speed"],
];

export function Controls() {
  void [numSnapshots.value, mode.value, shown.value];
  const { isPlaying, isLive, speed, frames, index } = playback;
  const behind = (playback.behind / 1000).toFixed(1);
  const isBehind = !isLive && frames.length > 0;
  return (
    <div class="controls" role="group" aria-label="Playback">
      <button class="button" type="button" aria-pressed={!isPlaying} disabled={frames.length === 0} onClick={() => steer((p) => (isPlaying ? p.pause() : p.play(p.speed)))}>
        {isPlaying ? <Pause /> : <Play />} {isPlaying ? "Pause" : "Play"}
      </button>
      <div class="segments" role="group" aria-label="Speed">
        {SPEEDS.map(([value, text, name]) => (
          <button key={value} type="button" title={name} aria-pressed={isPlaying && speed === value} onClick={() => steer((p) => p.play(value))}>
            {text}
          </button>
        ))}
      </div>
      <input
        class="scrubber"
        type="range"
        aria-label="Time shown"
        aria-valuetext={isBehind ? `${behind} seconds behind` : "live"}
        min={0}
        max={Math.max(1, frames.length - 1)}
        value={isLive ? Math.max(1, frames.length - 1) : index}
        disabled={frames.length < 2}
        onInput={(event) => steer((p) => p.seek(Number(event.currentTarget.value)))}
      />
      <button class="button live-button" type="button" aria-pressed={isLive} onClick={() => steer((p) => p.goLive())}>
        {isBehind ? `${behind} s behind · go live` : "Live"}
      </button>
    </div>
  );
}
