/** Which pane is shown, by the address behind "#": a reload keeps it, and back works. */

import { signal } from "@preact/signals";

export type Route = "chat" | "engine";

function read(): Route {
  return location.hash === "#/engine" ? "engine" : "chat";
}

export const route = signal<Route>(read());
addEventListener("hashchange", () => (route.value = read()));

export function show(to: Route): void {
  location.hash = hrefOf(to);
}

export const hrefOf = (to: Route): string => (to === "engine" ? "#/engine" : "#/");
