// Package talos is the test bed with real Talos: it builds the release of Talos that TALOS selects, containerd and
// runc, boots a control plane machine and a worker as Talos containers in network namespaces, with an extension laid
// over their root file systems, lets them render a real Kubernetes, and hands out what a test needs to watch and
// disturb them.
//
// It needs root on Linux (amd64), and never skips. It never touches sysctls, mounts, host names or networks of the
// machine that it runs on. All processes of a bed die with the process that started it, even if that is killed; the
// next bed removes leftover directories and cgroups.
package talos
