// Package preview shows what talos-ccm would write to the Node of a machine, without a cluster: what talosctl prints of a machine goes in, a
// Report comes out.
//
// It decides nothing itself: what a Node gets is nodespec's business, and what a rule means is transform's. It never dials, and never
// writes to anything but the writer it is given.
package preview
