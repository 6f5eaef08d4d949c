/** The engine view, loaded when it is first opened: what it counts now. */

import { useEffect } from "preact/hooks";
import { isConnected } from "../app/connection.ts";
import { fault, look, snapshot } from "./store.ts";
import "./engine.css";

export function EnginePane() {
  const isUp = isConnected.value;
  useEffect(() => (isUp ? look() : undefined), [isUp]);
  const body = snapshot.value;
  const step = body?.engine.step;
  const facts: [string, number | undefined][] = [
    ["running", step?.running],
    ["waiting", step?.waiting],
    ["paused", step?.paused],
    ["preempted", step?.preempted],
    ["blocks in use", step && step.blocks_total - step.blocks_free],
    ["blocks", step?.blocks_total],
    ["steps", step?.steps],
    ["tokens generated", step?.generated_tokens],
  ];
  return (
    <main class="pane engine" aria-busy={body === null}>
      <div class="engine-page">
        <h2>Engine</h2>
        {fault.value && <p class="fault">{fault}</p>}
        <dl class="facts">
          {facts.map(([name, value]) => (
            <div key={name}>
              <dt>{name}</dt>
              <dd>{value === undefined ? "–" : value.toLocaleString()}</dd>
            </div>
          ))}
        </dl>
      </div>
    </main>
  );
}
