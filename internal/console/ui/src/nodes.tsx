import { useEffect } from "preact/hooks";
import { count } from "./format";
import { useWorld, world } from "./live";
import { HealthIcon } from "./overview";
import type { Node } from "./types";

export function Nodes() {
  useWorld();
  useEffect(() => void (document.title = "Nodes · Portal"), []);
  const zones = new Map<string, Node[]>();
  for (const node of [...world.nodes.values()].sort((a, b) => Number(a.ready) - Number(b.ready) || (a.name < b.name ? -1 : 1))) {
    const zone = node.zone ?? "";
    zones.set(zone, [...(zones.get(zone) ?? []), node]);
  }
  if (zones.size === 0)
    return (
      <section class="empty">
        <h1>Nodes</h1>
        <p>{!world.status?.synced ? "Loading …" : world.status.limits?.includes("Nodes") ? "You may not see Nodes." : "There are no nodes."}</p>
      </section>
    );
  return (
    <>
      <h1>Nodes</h1>
      {[...zones].sort(([a], [b]) => (a < b ? -1 : 1)).map(([zone, nodes]) => (
        <section class="card" key={zone}>
          <h2>
            {zone ? `Zone ${zone}` : zones.size > 1 ? "No zone" : "All nodes"}{" "}
            <small>
              {count(nodes.filter((n) => n.ready).length, "node")} ready of {nodes.length}, {count(nodes.reduce((sum, n) => sum + n.endpoints, 0), "ready endpoint")}
            </small>
          </h2>
          <ul class="nodes">
            {nodes.map((n) => (
              <li key={n.name} class={n.ready ? "ok" : "broken"}>
                <HealthIcon health={n.ready ? "ok" : "broken"} />
                <div>
                  <b>{n.name}</b> {n.cordoned && <small>cordoned</small>}
                  <small class="block">{n.addresses?.join(", ")}</small>
                  <small class="block">{n.ready ? count(n.endpoints, "ready endpoint") : `Not ready: ${n.reason || "no reason given"}`}</small>
                </div>
              </li>
            ))}
          </ul>
        </section>
      ))}
    </>
  );
}
