/** The one client of the page, and what it says as signals. The key lives in this tab alone. */

import { computed, signal } from "@preact/signals";
import { Client, type ConnectionState, type Session } from "../client/index.ts";

const KEY = "streamer.key";

function loadKey(): string {
  try {
    return sessionStorage.getItem(KEY) ?? "";
  } catch {
    return "";
  }
}

function keepKey(key: string): void {
  try {
    if (key) sessionStorage.setItem(KEY, key);
    else sessionStorage.removeItem(KEY);
  } catch {
    // private mode: for as long as the page is open
  }
}

export const client = new Client({ baseUrl: new URL("./", location.href), key: loadKey() });
export const connection = signal<ConnectionState>(client.state);
export const session = signal<Session | null>(null);
export const isConnected = computed(() => connection.value.name === "connected");
/** Rises when the server forgot what it had: ids of earlier responses mean nothing then. */
export const epoch = signal(0);

client.on("state", (state) => {
  if (state.name === "locked") {
    keepKey("");
    client.http.key = "";
  }
  connection.value = state;
});
client.on("session", (value) => (session.value = value));
client.on("epoch", () => (epoch.value += 1));

export function useKey(key: string): void {
  keepKey(key);
  client.setKey(key);
}

/** Connect, and look again whenever the network or the tab comes back. */
export function start(): void {
  client.connect();
  for (const name of ["online", "offline"]) addEventListener(name, () => client.check());
  document.addEventListener("visibilitychange", () => {
    if (document.visibilityState === "visible") client.check();
  });
}
