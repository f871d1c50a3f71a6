// Package e2e shows talos-ccm at work as the extension it is: on two real Talos machines with real kubelets (see test/talos). Its
// tests need root and the build tag e2e.
package e2e
