// Package talos is the test bed with real Talos: it builds the release of Talos that TALOS selects, containerd and runc, boots a control
// plane machine and a worker as Talos containers in network namespaces, with an extension laid over their root file systems,
// lets them render a real Kubernetes, and hands out what a test needs to watch and disturb them.
//
// It needs root on Linux (amd64) and says so where that is missing; it never skips. It never touches sysctls, mounts, host names
// or networks of the machine that it runs on, and leaves neither process nor folder behind: everything a bed starts dies with
// the process that brought it up, even when that is killed, and what is left of files is swept by the next one.
package talos
