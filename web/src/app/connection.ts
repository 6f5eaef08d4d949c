/** The page's only client, with its state as signals. The key is kept in this tab only. */

import { computed, signal } from "@preact/signals";
import { Client, type ConnectionState, type Session } from "../client/index.ts";
import { recall, remember } from "./storage.ts";

const KEY = "streamer.key";

export const client = new Client({ baseUrl: new URL("./", location.href), key: recall("sessionStorage", KEY) ?? "" });
export const connection = signal<ConnectionState>(client.state);
export const session = signal<Session | null>(null);
export const isConnected = computed(() => connection.value.name === "connected");
/** A try failed, and others follow: more than the moment that a cut connection takes to come back. */
export const isTryingAgain = signal(false);

client.on("state", (state) => {
  if (state.name === "locked") {
    remember("sessionStorage", KEY, null);
    client.http.key = "";
  }
  if (state.name === "reconnecting") isTryingAgain.value = state.attempt > 1;
  else if (state.name !== "connecting") isTryingAgain.value = false;
  connection.value = state;
});
client.on("session", (value) => (session.value = value));

export function useKey(key: string): void {
  remember("sessionStorage", KEY, key);
  client.setKey(key);
}

/** Connect, and check the connection whenever the network or the tab comes back. */
export function start(): void {
  client.connect();
  for (const name of ["online", "offline"]) addEventListener(name, () => client.check());
  document.addEventListener("visibilitychange", () => {
    if (document.visibilityState === "visible") client.check();
  });
}
