// Package talos provides a test bed with real Talos machines. It builds the release of Talos that TALOS selects,
// containerd and runc, boots control planes and workers as Talos containers in network namespaces, with an extension
// in their root file systems, and bootstraps Kubernetes. Tests use it to observe the machines and to inject faults.
//
// It requires root on Linux (amd64), and never skips. It does not change the host's sysctls, mounts, host name or
// networks. All processes of a bed end with the process that started it, even if that is killed. The next bed removes
// leftover directories and cgroups.
package talos
