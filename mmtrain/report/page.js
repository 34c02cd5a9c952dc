"use strict";
// Draws the charts that the page's JSON describes and makes the tables behind them. Text of the data only ever becomes
// text: textContent here, labels of an SVG in ECharts.
(() => {
  const charts = JSON.parse(document.getElementById("data").textContent);
  const DASHES = ["solid", "dashed", "dotted"];
  const drawn = [];

  const style = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const colour = place => style(`--c${place}`);
  const node = (name, text, properties) => Object.assign(document.createElement(name), { textContent: text }, properties);

  function shown(value, unit) {
    if (unit === "share") return `${Number((100 * value).toPrecision(4))}%`;
    const size = Math.abs(value);
    if (size >= 1e6 || (size > 0 && size < 1e-3)) return value.toExponential(2).replace(/\.?0+e/, "e").replace("e+", "e");
    return value.toLocaleString("en", { maximumSignificantDigits: 6 });
  }

  // ---- charts

  function axis(unit, name, more) {
    const soft = style("--soft");
    return {
      name, nameLocation: "middle", nameTextStyle: { color: soft, fontSize: 12 },
      axisLabel: { color: soft, fontSize: 12, hideOverlap: true, formatter: value => shown(value, unit) },
      axisLine: { lineStyle: { color: style("--line") } }, splitLine: { lineStyle: { color: style("--split") } },
      ...more,
    };
  }

  function frame() {
    return {
      animation: false, aria: { enabled: false }, textStyle: { fontFamily: "system-ui, Liberation Sans, sans-serif" },
      legend: { show: false }, grid: { left: 8, right: 16, top: 12, bottom: 24, containLabel: true },
    };
  }

  function tip(unit) {
    return {
      renderMode: "richText", confine: true, backgroundColor: style("--page"), borderColor: style("--soft"),
      textStyle: { color: style("--text"), fontSize: 12 }, valueFormatter: value => shown(value, unit),
    };
  }

  function linesOption(chart, log) {
    const isSmall = chart.series.every(one => one.points.every(([, y]) => y < 0.2));
    const isMark = one => !["line", "faint"].includes(one.look);
    return {
      ...frame(),
      tooltip: { trigger: "axis", axisPointer: { label: { formatter: ({ value }) => shown(value) } }, ...tip(chart.y_unit) },
      xAxis: axis("number", "step", { type: "value", nameGap: 28, min: "dataMin", max: "dataMax", axisPointer: { snap: true }, splitLine: { show: false } }),
      yAxis: axis(chart.y_unit, "", { type: log ? "log" : "value", scale: true, ...(chart.y_unit === "share" ? { min: 0, ...(isSmall ? {} : { max: 1 }) } : {}) }),
      series: chart.series.map(one => ({
        name: one.name, type: isMark(one) ? "scatter" : "line", data: one.points,
        symbol: "circle", symbolSize: isMark(one) ? 10 : 5, showSymbol: one.points.length < 40,
        itemStyle: { color: colour(one.colour) }, z: isMark(one) ? 4 : 3,
        lineStyle: { color: colour(one.colour), type: DASHES[one.dash % 3], width: one.look === "faint" ? 1 : 2, opacity: one.look === "faint" ? 0.4 : 1 },
      })),
    };
  }

  function barsOption(chart) {
    return {
      ...frame(),
      tooltip: { trigger: "axis", axisPointer: { type: "shadow" }, ...tip(chart.y_unit) },
      xAxis: axis(chart.y_unit, chart.y_name, { type: "value", nameGap: 28, ...(chart.y_unit === "share" ? { max: 1 } : {}) }),
      yAxis: axis("", "", { type: "category", data: chart.rows, inverse: true, axisLabel: { color: style("--soft"), fontSize: 12 }, splitLine: { show: false } }),
      series: chart.series.map(bar => ({
        name: bar.name, type: "bar", stack: bar.stack || undefined, data: bar.points, barMaxWidth: bar.stack === "planned" ? 14 : 22,
        itemStyle: { color: colour(bar.colour), borderColor: style("--page"), borderWidth: 1 },
      })),
    };
  }

  function draw(entry) {
    const { chart, plot, log } = entry;
    if (!entry.instance) {
      if (chart.rows.length) plot.style.height = `${Math.max(10, 5 + 3.2 * chart.rows.length)}rem`;
      entry.instance = echarts.init(plot, null, { renderer: "svg" });
      new ResizeObserver(() => entry.instance.resize()).observe(plot);
    }
    entry.instance.setOption(chart.rows.length ? barsOption(chart) : linesOption(chart, log), true);
    for (const name of entry.hidden) entry.instance.dispatchAction({ type: "legendUnSelect", name });
  }

  // ---- what is shown

  function toggles(entry, place) {
    const { chart } = entry;
    if (chart.series.length > 1) {
      for (const one of chart.series) {
        const button = node("button", "", { type: "button" });
        const sign = node("span", one.look === "bar" ? "■ " : "● ");
        sign.setAttribute("aria-hidden", "true");
        sign.className = `c${one.colour}`;
        button.append(sign, one.name);
        button.setAttribute("aria-pressed", "true");
        button.addEventListener("click", () => {
          const isHidden = entry.hidden.delete(one.name) ? false : Boolean(entry.hidden.add(one.name));
          button.setAttribute("aria-pressed", String(!isHidden));
          entry.instance.dispatchAction({ type: isHidden ? "legendUnSelect" : "legendSelect", name: one.name });
        });
        place.append(button);
      }
    }
    if (chart.log) {
      const button = node("button", "logarithmic", { type: "button", className: "switch" });
      button.setAttribute("aria-pressed", "false");
      button.addEventListener("click", () => {
        entry.log = !entry.log;
        button.setAttribute("aria-pressed", String(entry.log));
        draw(entry);
      });
      place.append(button);
    }
  }

  // ---- tables

  function rowsOf(chart) {
    const columns = chart.series.filter(one => !one.derived);
    const values = columns.map(one => new Map(one.points.filter(([, y]) => y !== null)));
    const places = [...new Set(values.flatMap(of => [...of.keys()]))].sort((a, b) => a - b);
    return [["step", ...columns.map(one => one.name)], places.map(x => [x, ...values.map(of => of.get(x) ?? "")])];
  }

  function makeTable(chart, place) {
    const [columns, rows] = rowsOf(chart), table = document.createElement("table");
    table.append(node("caption", `${chart.title}: ${chart.y_name}`));
    const head = table.createTHead().insertRow(), body = table.createTBody();
    for (const name of columns) head.append(node("th", name, { scope: "col", className: "number" }));
    for (const row of rows) {
      const line = body.insertRow();
      for (const value of row) line.append(node("td", String(value), { className: "number" }));
    }
    place.replaceChildren(table);
  }

  for (const figure of document.querySelectorAll("figure[data-chart]")) {
    const chart = charts[figure.dataset.chart];
    const entry = { chart, plot: figure.querySelector(".plot"), hidden: new Set(), log: false, instance: null };
    toggles(entry, figure.querySelector(".toggles"));
    draw(entry);
    drawn.push(entry);
    const details = figure.querySelector("details");
    if (!chart.rows.length) details.addEventListener("toggle", () => { if (details.open) makeTable(chart, details.querySelector(".scroll")); });
  }
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => drawn.forEach(draw));
})();
