/** The frame: sidebar, header, and the address's pane; the engine view loads on demand. */

import { signal } from "@preact/signals";
import type { ComponentType } from "preact";
import { useEffect } from "preact/hooks";
import { DeleteDialog } from "../chat/history/list.tsx";
import { ChatPane, focusComposer } from "../chat/pane.tsx";
import { SettingsDialog } from "../chat/composer/settings.tsx";
import { HelpDialog, onShortcut } from "../chat/shortcuts.tsx";
import { Header } from "./header.tsx";
import { KeyDialog } from "./key-dialog.tsx";
import { route } from "./route.ts";
import { Sidebar, isSidebarOpen } from "./sidebar.tsx";

const EnginePane = signal<ComponentType>(Loading);

function Loading() {
  return <main class="pane" aria-busy="true" />;
}

/** After an update of the server this page's chunks may be gone: load the new page. */
function Lost() {
  return (
    <main class="pane empty">
      <h1>Engine</h1>
      <p class="fault" role="alert">
        This part of the page could not be loaded. Reload the page.
      </p>
    </main>
  );
}

async function loadEngine(): Promise<void> {
  try {
    EnginePane.value = (await import("../engine/pane.tsx")).EnginePane;
  } catch {
    EnginePane.value = Lost;
  }
}

function Engine() {
  useEffect(() => void loadEngine(), []);
  const Pane = EnginePane.value;
  return <Pane />;
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
      <div class="stage" inert={isSidebarOpen.value}>
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
