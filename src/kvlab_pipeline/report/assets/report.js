"use strict";
// The page's theme, folds and figures. Runs in the head, so that the theme is there before the first word is painted.
(() => {
  const root = document.documentElement;
  const KEY = "kvlab-theme";
  const REACH = 24; // pixels from a mark at which it is still pointed at
  const systemDark = matchMedia("(prefers-color-scheme: dark)");
  const wide = matchMedia("(min-width: 64rem)");

  /** The browser's memory; a page opened from disk may be refused one, then a choice holds until it is closed. */
  const memory = (use) => {
    try {
      return use(localStorage);
    } catch {
      return null;
    }
  };
  const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : systemDark.matches);
  const setTheme = (theme) => {
    if (theme === "dark" || theme === "light") {
      root.dataset.theme = theme;
    }
    document.getElementById("theme")?.setAttribute("aria-pressed", String(isDark()));
  };

  root.dataset.scripts = "";
  setTheme(memory((kept) => kept.getItem(KEY)));

  /** Open every fold around the part of the page that its address names. */
  const reveal = () => {
    const target = document.getElementById(decodeURIComponent(location.hash.slice(1)));
    for (let fold = target?.closest("details"); fold; fold = fold.parentElement.closest("details")) {
      fold.open = true;
    }
    target?.closest("details")?.scrollIntoView();
  };

  /** Only a table that does scroll is a stop of the keyboard. */
  const markScrolling = () => {
    for (const region of document.querySelectorAll(".scroll")) {
      if (region.scrollWidth > region.clientWidth + 1) {
        region.tabIndex = 0;
      } else {
        region.removeAttribute("tabindex");
      }
    }
  };

  /** How far a point of the window is from a box; 0 inside it, or on its edge. */
  const distance = (box, x, y) =>
    Math.hypot(Math.max(box.left - x, 0, x - box.right), Math.max(box.top - y, 0, y - box.bottom));

  /** Let a figure's marks be pointed at, and stepped through by key. */
  const tell = (plot) => {
    const words = JSON.parse(document.getElementById(plot.id.replace(/plot$/, "words")).textContent);
    const said = plot.querySelector(".said");
    let current = -1;
    const drawing = () => [...plot.querySelectorAll("svg")].find((one) => one.getClientRects().length);

    const silence = () => {
      plot.querySelectorAll(".on").forEach((mark) => mark.classList.remove("on"));
      delete plot.dataset.told;
      said.replaceChildren();
    };
    const say = (row) => {
      silence();
      current = row;
      const marks = [...drawing().querySelectorAll(`[data-row="${row}"]`)];
      marks.forEach((mark) => mark.classList.add("on"));
      plot.dataset.told = "";
      said.replaceChildren(
        ...words[row].map((line) => {
          const part = document.createElement("span");
          part.textContent = line;
          return part;
        }),
      );
      const [box, room] = [marks.at(-1).getBoundingClientRect(), plot.getBoundingClientRect()];
      const right = box.right - room.left + 12;
      const left = box.left - room.left - said.offsetWidth - 12;
      const fits = right + said.offsetWidth <= room.width;
      said.style.left = `${fits ? right : Math.max(0, Math.min(left, room.width - said.offsetWidth))}px`;
      said.style.top = `${(fits || left >= 0 ? box.top : box.bottom + 8) - room.top}px`;
    };
    const step = (row) => {
      say((row + words.length) % words.length);
      said.scrollIntoView({ block: "nearest" });
    };
    const moves = {
      ArrowRight: () => step(current + 1),
      ArrowDown: () => step(current + 1),
      ArrowLeft: () => step(current < 0 ? -1 : current - 1),
      ArrowUp: () => step(current < 0 ? -1 : current - 1),
      Home: () => step(0),
      End: () => step(-1),
      Escape: silence,
    };
    plot.addEventListener("keydown", (event) => {
      if (!event.altKey && !event.ctrlKey && !event.metaKey && Object.hasOwn(moves, event.key)) {
        event.preventDefault();
        moves[event.key]();
      }
    });
    const point = ({ clientX, clientY }) => {
      let [nearest, least] = [-1, REACH];
      for (const mark of drawing().querySelectorAll("[data-row]")) {
        const box = mark.getBoundingClientRect();
        const centre = Math.hypot((box.left + box.right) / 2 - clientX, (box.top + box.bottom) / 2 - clientY);
        const away = distance(box, clientX, clientY) + centre / 1e4; // of boxes that overlap, the nearer centre
        if (away < least) {
          [nearest, least] = [Number(mark.dataset.row), away];
        }
      }
      if (nearest < 0) {
        silence();
      } else if (nearest !== current || !("told" in plot.dataset)) {
        say(nearest);
      }
    };
    plot.addEventListener("pointermove", point);
    plot.addEventListener("pointerdown", point);
    // a finger leaves when it is lifted; what it asked for stays
    plot.addEventListener("pointerleave", ({ pointerType }) => pointerType === "mouse" && silence());
    plot.addEventListener("blur", silence);
  };

  document.addEventListener("DOMContentLoaded", () => {
    const [contents, theme, unfold] = ["contents", "theme", "unfold"].map((id) => document.getElementById(id));
    const folds = [...document.querySelectorAll("main details:not(.numbers)")];
    contents.open = wide.matches;
    wide.addEventListener("change", () => (contents.open = wide.matches));
    theme.hidden = false;
    setTheme(null);
    theme.addEventListener("click", () => {
      setTheme(isDark() ? "light" : "dark");
      memory((kept) => kept.setItem(KEY, root.dataset.theme));
    });
    systemDark.addEventListener("change", () => setTheme(null));
    unfold.hidden = folds.length === 0;
    unfold.addEventListener("click", () => {
      const open = folds.some((fold) => !fold.open);
      folds.forEach((fold) => (fold.open = open));
      unfold.textContent = open ? "Close all sections" : "Open all sections";
    });
    document.querySelectorAll(".plot").forEach(tell);
    document.querySelectorAll("details").forEach((fold) => fold.addEventListener("toggle", markScrolling));
    addEventListener("resize", markScrolling);
    addEventListener("hashchange", reveal);
    markScrolling();
    reveal();
  });
})();
