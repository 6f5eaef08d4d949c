/** The frame: sidebar, header, and the pane that the address names. The engine's is loaded on demand. */

import { signal } from "@preact/signals";
import type { ComponentType } from "preact";
import { useEffect } from "preact/hooks";
import { DeleteDialog } from "../chat/history-list.tsx";
import { ChatPane, focusComposer } from "../chat/pane.tsx";
import { SettingsDialog } from "../chat/settings.tsx";
import { HelpDialog, onShortcut } from "../chat/shortcuts.tsx";
import { Header } from "./header.tsx";
import { KeyDialog } from "./key-dialog.tsx";
import { route } from "./route.ts";
import { Sidebar, isSidebarOpen } from "./sidebar.tsx";

const EnginePane = signal<ComponentType | null>(null);

function Engine() {
  useEffect(() => {
    void import("../engine/pane.tsx").then((module) => (EnginePane.value = module.EnginePane));
  }, []);
  const Pane = EnginePane.value;
  return Pane ? <Pane /> : <main class="pane" aria-busy="true" />;
}

function onKey(event: KeyboardEvent): void {
  if (event.key === "Escape" && isSidebarOpen.value) isSidebarOpen.value = false;
  else onShortcut(event);
}

export function App() {
  useEffect(() => {
    document.addEventListener("keydown", onKey);
    return () => document.removeEventListener("keydown", onKey);
  }, []);
  return (
    <div class="app">
      <Sidebar />
      <div class="stage">
        <Header />
        {route.value === "chat" ? <ChatPane /> : <Engine />}
      </div>
      <SettingsDialog />
      <HelpDialog />
      <DeleteDialog />
      <KeyDialog onClose={focusComposer} />
    </div>
  );
}
