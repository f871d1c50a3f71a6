// Package e2e tests talos-ccm as a system extension on two real Talos machines with real kubelets (see test/talos). The
// tests require root and the build tag e2e.
package e2e
