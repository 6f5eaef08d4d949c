/** The engine as it says it is, while the pane is open: nothing is asked of it otherwise. */

import { signal } from "@preact/signals";
import { client } from "../app/connection.ts";
import type { EngineBody } from "../client/index.ts";

export const snapshot = signal<EngineBody | null>(null);
export const fault = signal("");

/** Begin to look; the function that is returned ends it. */
export function look(): () => void {
  const show = (body: EngineBody) => {
    snapshot.value = body;
    fault.value = "";
  };
  return client.followEngine(show, (error) => (fault.value = error.message));
}
