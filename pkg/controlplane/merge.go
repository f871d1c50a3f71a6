package controlplane

import (
	"cmp"
	"errors"
	"fmt"
	"net/netip"
	"slices"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/utils/ptr"

	"github.com/talos-ccm/talos-ccm/pkg/csrpolicy"
	"github.com/talos-ccm/talos-ccm/pkg/inventory"
	"github.com/talos-ccm/talos-ccm/pkg/machine"
	"github.com/talos-ccm/talos-ccm/pkg/nodespec"
)

// localMachine takes the place of a nodename in errors and messages. It cannot be the name of a Node.
const localMachine = "this machine"

var errNoNode = errors.New("no Talos Node has the label node-role.kubernetes.io/control-plane; " +
	"a hosted control plane needs --hosted-control-plane, and no Node with the label")

// Network describes how the control plane is configured to assign addresses.
type Network struct {
	// Problem explains to operators why too little is known to assign addresses: the last refresh failed to read the
	// ServiceCIDRs, or the configuration of kube-controller-manager has not been read on any machine. It is empty if
	// there is no problem.
	Problem string
	// Machines is the number of control-plane machines, whether or not they have been read.
	Machines int
	// KCMConfigs are sorted by nodename. A machine that does not respond is listed with its last known configuration,
	// or not at all.
	KCMConfigs []KCMConfig
	// ServiceCIDRs are the CIDRs of the ServiceCIDR API; none in clusters without it. They are kept when they cannot be
	// read again.
	ServiceCIDRs []netip.Prefix
}

// IsMajority reports whether the configuration of kube-controller-manager is known for most of the control-plane
// machines.
func (n *Network) IsMajority() bool { return n.Machines == 0 || 2*len(n.KCMConfigs) > n.Machines }

// Allocators returns the nodenames of the kube-controller-managers that assign pod CIDRs.
func (n *Network) Allocators() []string {
	var names []string

	for _, config := range n.KCMConfigs {
		if config.AllocatesNodeCIDRs {
			names = append(names, config.Nodename)
		}
	}

	return names
}

// KCMConfig is how kube-controller-manager assigns addresses on one control-plane machine.
type KCMConfig struct {
	// Nodename of the machine, or "this machine" while no Node has the label of the control plane.
	Nodename string
	machine.KCMConfig
}

type facts struct {
	apiServer apiServer
	nodes     []*corev1.Node
	// isLabeled is true if a Node has the label of the control plane.
	isLabeled bool
	// machines are those of labeled Nodes, sorted by nodename. If no Node is labeled: only the local machine, named
	// localMachine.
	machines []source
	hosted   *csrpolicy.ClusterSubjects
}

type source struct {
	nodename string
	entry    inventory.Entry
}

// read returns the facts that were read from the machine. They are not lost when it stops responding.
func (s source) read() machine.ControlPlane {
	return ptr.Deref(s.entry.Last.ControlPlane, machine.ControlPlane{})
}

// subjects returns nil for localMachine: its names and addresses do not count.
func (s source) subjects() *machine.ClusterSubjects {
	if s.nodename == localMachine {
		return nil
	}

	return s.read().Subjects
}

// isHosted reports whether the operator's facts replace those of control-plane machines.
func (f *facts) isHosted() bool { return f.hosted != nil && !f.isLabeled }

// isPending reports whether a machine has not been contacted yet.
func (f *facts) isPending() bool {
	return slices.ContainsFunc(f.machines, func(s source) bool { return s.entry.Condition == inventory.Unknown })
}

// problems returns why facts of machines could not be read the last time.
func (f *facts) problems() (errs []error) {
	for _, s := range f.machines {
		read := s.read()

		problem := cmp.Or(s.entry.Reason, read.Problem)
		if problem == "" && !read.IsComplete() {
			problem = "it has not responded yet"
		}

		if problem != "" {
			errs = append(errs, fmt.Errorf("read control-plane machine %s: %s", s.nodename, problem))
		}
	}

	if isNone := len(f.machines) == 0 || f.machines[0].nodename == localMachine; isNone && !f.isHosted() {
		errs = append(errs, errNoNode)
	}

	return errs
}

// identity returns the last answers of all sources, in a fixed order: equal answers must compare as equal.
func (f *facts) identity() csrpolicy.ClusterIdentity {
	var none csrpolicy.ClusterSubjects

	api := f.apiServer
	certificate, service, serviceCIDRs := ptr.Deref(api.certificate, none), ptr.Deref(api.service, none), ptr.Deref(api.serviceCIDRs, none)
	answered := !slices.Contains([]*csrpolicy.ClusterSubjects{api.certificate, api.service, api.serviceCIDRs}, nil)

	// The default domain is reserved whether or not the cluster uses it.
	domains := append(domainsIn(certificate.APIServerNames), machine.DefaultDomain)
	slices.Sort(domains)

	id := csrpolicy.ClusterIdentity{Domains: slices.Compact(domains), Stated: csrpolicy.ClusterSubjects{
		APIServerNames: certificate.APIServerNames,
		APIServerIPs:   slices.Concat(certificate.APIServerIPs, service.APIServerIPs),
		VIPs:           service.VIPs,
	}}

	for _, endpoint := range api.endpoints {
		id.APIServerPorts = append(id.APIServerPorts, int32(endpoint.Port()))
	}

	report := func(source string, subjects csrpolicy.ClusterSubjects) {
		id.Reported = append(id.Reported, csrpolicy.Report{Source: source, ClusterSubjects: subjects})
	}

	// A ServiceCIDR that contains Nodes is only reported, so that requests wait. If it were stated, all requests of these
	// Nodes' kubelets would be denied.
	for _, cidr := range serviceCIDRs.ServiceCIDRs {
		inCIDR := func(node *corev1.Node) bool { return slices.ContainsFunc(nodespec.DialAddresses(node), cidr.Contains) }
		if slices.ContainsFunc(f.nodes, inCIDR) {
			report("a ServiceCIDR that contains addresses of Nodes", csrpolicy.ClusterSubjects{ServiceCIDRs: []netip.Prefix{cidr}})
		} else {
			id.Stated.ServiceCIDRs = append(id.Stated.ServiceCIDRs, cidr)
		}
	}

	if f.hosted != nil {
		report("the flags about the hosted control plane", *f.hosted)
	}

	reports, suffices := f.reports()
	id.Reported = append(id.Reported, reports...)

	hasServices := func(report csrpolicy.Report) bool { return len(report.ServiceCIDRs) > 0 }
	id.Known = answered && (suffices || f.isHosted()) && (len(id.Stated.ServiceCIDRs) > 0 || slices.ContainsFunc(id.Reported, hasServices))

	return id
}

// reports returns what the machines report, and whether that suffices: the local machine or most of them have answered.
func (f *facts) reports() (reports []csrpolicy.Report, suffices bool) {
	isLocalKnown := false

	for _, s := range f.machines {
		if subjects := s.subjects(); subjects != nil {
			isLocalKnown = isLocalKnown || s.read().Local

			reports = append(reports, csrpolicy.Report{Source: fmt.Sprintf("machine %q", s.nodename), ClusterSubjects: *subjects})
		}
	}

	return reports, isLocalKnown || 2*len(reports) > len(f.machines)
}

func (f *facts) network() *Network {
	network := &Network{Machines: len(f.machines)}

	for _, s := range f.machines {
		if config := s.read().KCM; config != nil {
			network.KCMConfigs = append(network.KCMConfigs, KCMConfig{s.nodename, *config})
		}
	}

	if f.apiServer.serviceCIDRs != nil {
		network.ServiceCIDRs = f.apiServer.serviceCIDRs.ServiceCIDRs
	}

	switch {
	case f.apiServer.serviceCIDRsErr != nil:
		network.Problem = "Failed to " + f.apiServer.serviceCIDRsErr.Error()
	case len(network.KCMConfigs) == 0 && !f.isHosted():
		network.Problem = "The configuration of kube-controller-manager is not known for any control-plane machine"

		for _, err := range f.problems() {
			network.Problem += "; " + err.Error()
		}
	}

	return network
}

// members returns the members. SeenBy omits machines that do not respond.
func (f *facts) members() *Members {
	members := &Members{SeenBy: map[string]MemberList{}}

	for _, s := range f.machines {
		if s.nodename == localMachine {
			continue
		}

		members.ControlPlane++

		if list := s.read().Members; list != nil && s.entry.Condition == inventory.Current {
			members.SeenBy[s.nodename] = list
		}
	}

	return members
}
