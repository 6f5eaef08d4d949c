/** The figures of the shown snapshot. */

import { factsOf } from "./facts.ts";
import { samples, shown } from "./snapshots/store.ts";

export function Figures() {
  const frame = shown.value;
  const rate = samples.findLast((sample) => sample.at <= (frame?.at ?? 0))?.tokensPerS ?? 0;
  const facts = frame ? factsOf(frame.body.scheduler.stats, rate) : [];
  return (
    <dl class="facts">
      {facts.map(([name, value, note]) => (
        <div key={name}>
          <dt>{name}</dt>
          <dd>
            {value} <small>{note}</small>
          </dd>
        </div>
      ))}
    </dl>
  );
}
