"use strict";
// The page's theme and figures. Runs in the head, so that the theme is there before the first word is painted.
(() => {
  const root = document.documentElement;
  const KEY = "kvlab-theme";
  const NARROW = 560; // pixels of a figure: below, panels are stacked and rows carry their name above them
  const systemDark = matchMedia("(prefers-color-scheme: dark)");
  const wide = matchMedia("(min-width: 64rem)");
  const darkColours = JSON.parse(document.getElementById("dark-colours").textContent);

  // ------------------------------------------------------------------------------------------- theme

  const remembered = () => {
    try {
      return localStorage.getItem(KEY);
    } catch {
      return null; // a page opened from disk may be refused a memory
    }
  };
  const remember = (theme) => {
    try {
      localStorage.setItem(KEY, theme);
    } catch {
      // then the choice holds until the page is closed
    }
  };
  const isDark = () => root.dataset.theme === "dark";

  const setTheme = (theme) => {
    root.dataset.theme = theme;
    const button = document.getElementById("theme");
    if (button) {
      button.setAttribute("aria-pressed", String(isDark()));
    }
  };
  const chosen = () => {
    const choice = remembered();
    return choice === "dark" || choice === "light" ? choice : systemDark.matches ? "dark" : "light";
  };

  root.dataset.scripts = "";
  setTheme(chosen());

  // ------------------------------------------------------------------------------------------ figures

  /** A copy of plotly's JSON in which every colour is the current theme's. */
  const coloured = (part) => {
    if (typeof part === "string") {
      return isDark() && Object.hasOwn(darkColours, part) ? darkColours[part] : part;
    }
    if (Array.isArray(part)) {
      return part.map(coloured);
    }
    if (part && typeof part === "object") {
      return Object.fromEntries(Object.entries(part).map(([key, value]) => [key, coloured(value)]));
    }
    return part;
  };

  const suffixes = (count) => Array.from({ length: count }, (_, panel) => (panel === 0 ? "" : String(panel + 1)));

  /** Panels below each other; the first on top. */
  const stack = (layout, count) => {
    const rows = layout.meta.panel_rows ?? 1;
    layout.height = 0.85 * count * (layout.height / rows);
    layout.legend.y = 1 + 26 / (layout.height - 80); // above the words of the first panel
    const gap = 85 / layout.height; // room for an axis below a panel and the words above the next
    const height = (1 - gap * (count - 1)) / count;
    suffixes(count).forEach((suffix, panel) => {
      const top = 1 - panel * (height + gap);
      layout[`xaxis${suffix}`].domain = [0, 1];
      layout[`yaxis${suffix}`].domain = [Math.max(0, top - height), top];
      layout[`yaxis${suffix}`].title = layout.yaxis.title;
    });
  };

  /** Rows with their name above their dots in place of beside them. */
  const nameAbove = (layout) => {
    const axis = layout.yaxis;
    const lines = Math.max(...axis.ticktext.map((text) => text.split("<br>").length));
    const row = 34 + 15 * lines; // pixels
    const names = axis.ticktext.map((text, at) => ({
      text,
      xref: "paper",
      x: 0,
      xanchor: "left",
      y: axis.tickvals[at] - 0.26,
      yanchor: "bottom",
      align: "left",
      borderpad: 0,
      showarrow: false,
    }));
    layout.annotations = [...(layout.annotations ?? []), ...names];
    axis.showticklabels = false;
    axis.showgrid = false;
    axis.range = [axis.range[0], -0.4 - (15 * lines) / row];
    layout.bargap = 0.56;
    layout.height = 110 + layout.meta.named_rows * row;
  };

  /** Text in lines that fit beside a point; a break never falls inside an escaped character. */
  const wrapped = (text) =>
    text
      .split("<br>")
      .flatMap((line) => line.match(/.{1,36}(?=\s|$)|\S+/g) ?? [line])
      .map((line) => line.trim())
      .join("<br>");

  /** Change a figure so that it fits a phone. */
  const fit = (data, layout) => {
    layout.font.size = 12;
    layout.hoverlabel.font.size = 11;
    for (const trace of data) {
      trace.hovertext = trace.hovertext?.map(wrapped);
    }
    if (layout.xaxis.type !== "log") {
      layout.xaxis.nticks = 5;
    }
    if (layout.meta.panels > 1) {
      stack(layout, layout.meta.panels);
    }
    if (layout.meta.named_rows) {
      nameAbove(layout);
    }
  };

  const draw = (plot) => {
    const { data, layout } = coloured(plot.source);
    layout.width = plot.clientWidth;
    if (layout.width < NARROW) {
      fit(data, layout);
    }
    Plotly.react(plot, data, layout, { displayModeBar: false });
  };

  /** Every point of a figure, in the order of its table's rows. */
  const pointsOf = (data) =>
    data
      .flatMap((trace, curveNumber) =>
        (trace.meta?.rows ?? []).map((row, pointNumber) => ({
          row,
          at: { curveNumber, pointNumber },
          subplot: `${trace.xaxis ?? "x"}${trace.yaxis ?? "y"}`,
          words: trace.customdata[pointNumber].join("; "),
        })),
      )
      .sort((one, other) => one.row - other.row);

  const stepper = (plot, readout) => {
    const points = pointsOf(plot.source.data);
    let current = -1;
    const say = (words) => {
      readout.textContent = words;
      readout.dataset.told = "";
    };
    const goTo = (index) => {
      current = (index + points.length) % points.length;
      const point = points[current];
      Plotly.Fx.hover(plot, [point.at], point.subplot);
      say(point.words);
    };
    const moves = {
      ArrowRight: () => goTo(current + 1),
      ArrowDown: () => goTo(current + 1),
      ArrowLeft: () => goTo(current < 0 ? -1 : current - 1),
      ArrowUp: () => goTo(current < 0 ? -1 : current - 1),
      Home: () => goTo(0),
      End: () => goTo(-1),
      Escape: () => Plotly.Fx.unhover(plot),
    };
    plot.addEventListener("keydown", (event) => {
      if (!event.altKey && !event.ctrlKey && !event.metaKey && Object.hasOwn(moves, event.key)) {
        event.preventDefault();
        moves[event.key]();
      }
    });
    plot.addEventListener("blur", () => Plotly.Fx.unhover(plot));
    const tell = ({ points: [{ curveNumber, pointNumber }] }) => {
      current = points.findIndex(({ at }) => at.curveNumber === curveNumber && at.pointNumber === pointNumber);
      if (current >= 0) {
        say(points[current].words);
      }
    };
    plot.on("plotly_hover", tell);
    plot.on("plotly_click", tell); // a touch shows the label without the event of hovering
  };

  const start = (plot) => {
    const id = plot.id.replace(/-plot$/, "");
    const readout = document.getElementById(`${id}-readout`);
    try {
      plot.source = JSON.parse(document.getElementById(`${id}-data`).textContent);
      draw(plot);
      stepper(plot, readout);
    } catch (error) {
      plot.remove();
      readout.textContent = "This browser could not draw the figure; its numbers are in the table below.";
      console.error(error);
    }
  };

  // --------------------------------------------------------------------------------------------- page

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

  document.addEventListener("DOMContentLoaded", () => {
    const plots = [...document.querySelectorAll(".plot")];
    const contents = document.getElementById("contents");
    const button = document.getElementById("theme");
    const redraw = () => plots.filter((plot) => plot.isConnected && plot.source).forEach(draw);
    const show = (theme) => {
      setTheme(theme);
      redraw();
    };

    contents.open = wide.matches;
    wide.addEventListener("change", () => (contents.open = wide.matches));
    button.hidden = false;
    setTheme(root.dataset.theme);
    button.addEventListener("click", () => {
      const theme = isDark() ? "light" : "dark";
      remember(theme);
      show(theme);
    });
    systemDark.addEventListener("change", () => show(chosen()));

    plots.forEach(start);
    markScrolling();
    for (const details of document.querySelectorAll("details.numbers")) {
      details.addEventListener("toggle", markScrolling);
    }
    let waiting;
    addEventListener("resize", () => {
      clearTimeout(waiting);
      waiting = setTimeout(() => {
        redraw();
        markScrolling();
      }, 120);
    });
    let before;
    addEventListener("beforeprint", () => {
      before = root.dataset.theme;
      show("light");
    });
    addEventListener("afterprint", () => show(before));
  });
})();
