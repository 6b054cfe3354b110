import type { ComponentChildren } from "preact";
import { useEffect, useState } from "preact/hooks";
import { base } from "./live";

/** Place is where the page is: the path below the console's, and the query. */
export interface Place {
  path: string[];
  query: URLSearchParams;
}

const changed = new EventTarget();

function here(): Place {
  return {
    path: location.pathname.slice(base.length).split("/").filter(Boolean).map(decodeURIComponent),
    query: new URLSearchParams(location.search),
  };
}

export const href = (path: string[], query?: URLSearchParams) => {
  const search = query?.toString();
  return base + path.map(encodeURIComponent).join("/") + (search ? "?" + search : "");
};

/** go leads to another place; replace keeps the history as it is, for what changes with every key. */
export function go(to: string, replace = false) {
  if (replace) history.replaceState(null, "", to);
  else {
    history.pushState(null, "", to);
    window.scrollTo(0, 0);
  }
  changed.dispatchEvent(new Event("go"));
}

export function usePlace(): Place {
  const [place, set] = useState(here);
  useEffect(() => {
    const look = () => set(here());
    window.addEventListener("popstate", look);
    changed.addEventListener("go", look);
    return () => {
      window.removeEventListener("popstate", look);
      changed.removeEventListener("go", look);
    };
  }, []);
  return place;
}

interface LinkProps {
  to: string;
  children: ComponentChildren;
  class?: string;
  title?: string;
  tabIndex?: number;
  "aria-label"?: string;
  "aria-current"?: "page" | "true";
}

/** Link is an ordinary link that does not load the page anew. */
export function Link({ to, children, ...rest }: LinkProps) {
  return (
    <a
      {...rest}
      href={to}
      onClick={(e) => {
        if (e.metaKey || e.ctrlKey || e.shiftKey || e.altKey || e.button !== 0) return;
        e.preventDefault();
        go(to);
      }}
    >
      {children}
    </a>
  );
}
