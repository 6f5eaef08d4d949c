/** The engine view, loaded when first opened; it follows the engine while it is shown. */

import { useEffect } from "preact/hooks";
import { Charts } from "./charts.tsx";
import { Controls } from "./snapshots/controls.tsx";
import { Figures } from "./figures.tsx";
import { LoadButton, LoadCard } from "./load/card.tsx";
import { probe } from "./palette.ts";
import { Pools } from "./blocks/pools.tsx";
import { fault, shown, watchEngine } from "./snapshots/store.ts";
import { Tables } from "./blocks/tables.tsx";
import { TimelineView } from "./timeline/timeline.tsx";
import "./engine.css";

export function EnginePane() {
  useEffect(watchEngine, []);
  return (
    <main class="pane engine" aria-busy={shown.value === null}>
      <span ref={(element) => void (probe.value = element)} hidden />
      <div class="engine-page">
        <div class="engine-head">
          <div>
            <h1>Engine</h1>
            <p class="note">Where the tokens of each request are stored, and what each step computes.</p>
          </div>
          <LoadButton />
        </div>
        {fault.value && <p class="fault">{fault}</p>}
        <LoadCard />
        <Figures />
        <Controls />
        <Pools />
        <TimelineView />
        <Tables />
        <Charts />
      </div>
    </main>
  );
}
