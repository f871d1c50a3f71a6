package config

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"github.com/talos-ccm/talos-ccm/pkg/cidrset"
	"github.com/talos-ccm/talos-ccm/pkg/csrpolicy"
	"github.com/talos-ccm/talos-ccm/pkg/machine"
	"github.com/talos-ccm/talos-ccm/pkg/rules"
)

// Compiled is a validated configuration. It is immutable.
type Compiled struct {
	// ClusterName is empty if the configuration does not set it.
	ClusterName string
	PreferIPv6  bool
	// ProviderIDFallback is empty if the configuration does not set it.
	ProviderIDFallback ProviderIDFallback
	// Rules is never nil.
	Rules *rules.Set
	// FollowTopology changes the region and zone labels of initialized Nodes.
	FollowTopology bool
	// OmitConditions keeps the state of machines out of the conditions of Nodes.
	OmitConditions bool
	// OneExternalIPPerFamily lists only the first ExternalIP of each IP family.
	OneExternalIPPerFamily bool
	// NodeSelector selects the machines of managed Nodes; nil selects all.
	NodeSelector *rules.Selector
	// CSRSelector selects the machines whose certificate signing requests are decided; nil selects all.
	CSRSelector *rules.Selector
	// IPAMSelector selects the machines whose Nodes get pod CIDRs; nil selects all.
	IPAMSelector *rules.Selector
	// MaxExpiration is the maximum validity of a kubelet serving certificate.
	MaxExpiration time.Duration
	// CredentialPinning is `warn` or `enforce`; empty if it depends on the Node.
	CredentialPinning Choice
	// AllowedSANs are in the order of the file.
	AllowedSANs []CompiledSANs
	// IPAMFallback allows IPv6 blocks of the cluster CIDRs for machines without a prefix.
	IPAMFallback bool
	// Pools are in the order of the file. With `blockSize: auto`, a last one without CIDRs matches all Nodes that no
	// other pool selects.
	Pools []CompiledPool
	// Service is as in the file.
	Service   Service
	Lifecycle CompiledLifecycle
	// FactKinds are the kinds of facts that rules, selectors and pools read.
	FactKinds machine.FactKinds

	// Warnings are about parts of the file that have no effect or are probably mistakes. Only ParseFile returns them.
	Warnings []Problem
	// Environment are the variables in the ExtensionServiceConfig document. Only ParseFile returns them.
	Environment []string
}

// CompiledLifecycle are the settings of the lifecycle of Nodes.
type CompiledLifecycle struct {
	// Selector is nil if the machines of managed Nodes are selected.
	Selector                             *rules.Selector
	GracePeriod, AbsentPeriod            time.Duration
	DryRun, OutOfServiceTaint, Discovery bool
}

// CompiledSANs are additional names and addresses in the certificates of the selected machines.
type CompiledSANs struct {
	Name string
	// Selector is nil if all machines are selected.
	Selector *rules.Selector
	// DNSNames are canonical.
	DNSNames []string
	// IPAddresses are unmapped and have no zone.
	IPAddresses []netip.Addr
}

// CompiledPool is a source of pod CIDRs for the selected Nodes.
type CompiledPool struct {
	Name string
	// Selector is nil if all machines are selected.
	Selector *rules.Selector
	// CIDRs are masked and in the order of the file. Those of two pools are equal or do not overlap.
	CIDRs []netip.Prefix
	// ContainsMachines is true if machines have addresses in the CIDRs.
	ContainsMachines bool
	// MaskSizeIPv4 and MaskSizeIPv6 are 0 if the file does not set them. They are valid for all CIDRs of the pool.
	// For an IP family without CIDRs, they apply to CIDRs from elsewhere.
	MaskSizeIPv4, MaskSizeIPv6 int
	// BlockSizeAuto derives the size of IPv4 pod CIDRs from the maximum number of pods. MaskSizeIPv4 is 0 then.
	BlockSizeAuto bool
}

type validator struct {
	file      *decoder
	errs      field.ErrorList
	warnings  []rules.Warning
	factKinds machine.FactKinds // that selectors read
}

// validate compiles the file and reports semantic errors. It does not report values again that could not be
// decoded.
func (d *decoder) validate(file *Config) *Compiled {
	v := &validator{file: d}
	global, nodes, ipam, service := field.NewPath("global"), field.NewPath("nodes"), field.NewPath("ipam"), field.NewPath("service")
	transformations := field.NewPath("transformations")
	set, errs := rules.Compile(file.Transformations, file.Tables, transformations)
	v.errs, v.warnings = errs, rules.Warnings(file.Transformations, transformations)
	v.tables(field.NewPath("tables"), file.Tables)

	if reasons := validation.IsValidLabelValue(file.Global.ClusterName); len(reasons) > 0 {
		v.invalid(global.Child("clusterName"), file.Global.ClusterName, "must be a valid label value: %s", strings.Join(reasons, "; "))
	}

	oneOf(v, global.Child("providerIDFallback"), file.Global.ProviderIDFallback, FallbackUUID, FallbackNodeIP)
	oneOf(v, nodes.Child("topology"), file.Nodes.Topology, "keep", "follow")
	oneOf(v, nodes.Child("conditions"), file.Nodes.Conditions, "publish", "omit")
	oneOf(v, field.NewPath("addresses", "externalIPs"), file.Addresses.ExternalIPs, "all", "first-per-family")
	oneOf(v, field.NewPath("csrApproval", "credentialPinning"), file.CSRApproval.CredentialPinning, "warn", "enforce")
	oneOf(v, ipam.Child("blockSize"), file.IPAM.BlockSize, "auto")
	oneOf(v, service.Child("addresses"), file.Service.Addresses, AddressesExternal, AddressesInternal)

	for i, cidr := range file.Service.ExternalCIDRs {
		if _, err := cidrset.ParsePrefix(cidr); err != nil {
			v.refuse(service.Child("externalCIDRs").Index(i), err)
		}
	}

	for i, port := range file.Service.ReservedPorts {
		for _, reason := range validation.IsValidPortNum(port) {
			v.errs = append(v.errs, field.Invalid(service.Child("reservedPorts").Index(i), port, reason))
		}
	}

	compiled := &Compiled{
		ClusterName:            file.Global.ClusterName,
		PreferIPv6:             file.Global.PreferIPv6,
		ProviderIDFallback:     file.Global.ProviderIDFallback,
		Rules:                  set,
		FollowTopology:         file.Nodes.Topology == "follow",
		OmitConditions:         file.Nodes.Conditions == "omit",
		OneExternalIPPerFamily: file.Addresses.ExternalIPs == "first-per-family",
		NodeSelector:           v.selector(nodes.Child("selector"), file.Nodes.Selector, rules.CompileSelector),
		CSRSelector:            v.selector(field.NewPath("csrApproval", "selector"), file.CSRApproval.Selector, rules.CompileSelector),
		IPAMSelector:           v.selector(ipam.Child("selector"), file.IPAM.Selector, rules.CompileSelector),
		MaxExpiration: v.duration(field.NewPath("csrApproval", "maxExpiration"), file.CSRApproval.MaxExpiration,
			csrpolicy.DefaultMaxExpiration, csrpolicy.MinExpiration, "the minimum of Kubernetes"),
		CredentialPinning: file.CSRApproval.CredentialPinning,

		AllowedSANs: v.allowedSANs(field.NewPath("csrApproval", "allowedSANs"), file.CSRApproval.AllowedSANs),
		Pools:       v.pools(ipam.Child("pools"), file.IPAM),
		Service:     file.Service,
		Lifecycle:   v.lifecycle(field.NewPath("lifecycle"), file.Lifecycle),

		IPAMFallback: file.IPAM.FallbackToClusterCIDRs,
	}

	compiled.FactKinds = v.factKinds | set.FactKinds()

	v.report()

	return compiled
}

func (v *validator) tables(path *field.Path, tables rules.Tables) {
	rows := 0
	for _, table := range tables {
		rows += len(table)
	}

	if rows > MaxRows {
		v.errs = append(v.errs, field.TooMany(path, rows, MaxRows))
	}
}

func (v *validator) report() {
	d := v.file
	undecoded := d.problems

	for _, w := range v.warnings {
		d.warn(w.Path.String(), w.Msg)
	}

	for _, err := range v.errs {
		if !slices.ContainsFunc(undecoded, func(p Problem) bool { return p.covers(err.Field) }) {
			d.report(d.find(err.Field), err.Field, "%s", strings.TrimPrefix(err.ErrorBody(), "Invalid value: "))
		}

		if len(d.problems) == maxProblems {
			break
		}
	}
}

func (v *validator) invalid(path *field.Path, value, format string, args ...any) {
	v.errs = append(v.errs, field.Invalid(path, shorten(value, 80), fmt.Sprintf(format, args...)))
}

// refuse reports an error that includes the value.
func (v *validator) refuse(path *field.Path, err error) {
	v.errs = append(v.errs, field.Invalid(path, field.OmitValueType{}, err.Error()))
}

func (v *validator) line(path *field.Path) int { return v.file.find(path.String()).Line }

func oneOf[T ~string](v *validator, path *field.Path, value T, supported ...T) {
	if value != "" && !slices.Contains(supported, value) {
		v.errs = append(v.errs, field.NotSupported(path, T(shorten(string(value), 80)), supported))
	}
}

func (v *validator) selector(
	path *field.Path, terms []rules.SelectorTerm, compile func([]rules.SelectorTerm, *field.Path) (*rules.Selector, field.ErrorList),
) *rules.Selector {
	selector, errs := compile(terms, path)
	v.errs, v.warnings = append(v.errs, errs...), append(v.warnings, rules.SelectorWarnings(terms, path)...)
	v.factKinds |= selector.FactKinds()

	return selector
}

// duration parses a duration. why explains the minimum.
func (v *validator) duration(path *field.Path, s string, unset, minimum time.Duration, why string) time.Duration {
	if s == "" {
		return unset
	}

	d, err := time.ParseDuration(s)

	switch {
	case err != nil:
		v.invalid(path, s, "must be a duration such as 720h or 90m")
	case d < minimum:
		v.invalid(path, s, "must be at least %s, %s", minimum, why)
	}

	return d
}

func (v *validator) lifecycle(path *field.Path, file Lifecycle) CompiledLifecycle {
	return CompiledLifecycle{
		Selector: v.selector(path.Child("selector"), file.Selector, rules.CompileSelector),
		GracePeriod: v.duration(path.Child("gracePeriod"), file.GracePeriod, DefaultGracePeriod, MinGracePeriod,
			"since Kubernetes takes most of a minute to notice that a kubelet does not respond"),
		AbsentPeriod: v.duration(path.Child("absentPeriod"), file.AbsentPeriod, DefaultAbsentPeriod, MinAbsentPeriod,
			"since the discovery service remembers a machine for that time"),
		DryRun:            file.DryRun,
		OutOfServiceTaint: file.OutOfServiceTaint,
		Discovery:         file.Discovery,
	}
}

func (v *validator) allowedSANs(path *field.Path, entries []AllowedSANs) []CompiledSANs {
	var list []CompiledSANs

	names := map[string]int{}

	for i, e := range entries {
		p := path.Index(i)
		v.uniqueName(names, path, i, e.Name)

		if len(e.DNSNames)+len(e.IPAddresses) == 0 {
			v.errs = append(v.errs, field.Required(p, "must have dnsNames or ipAddresses"))
		}

		allowed := CompiledSANs{Name: e.Name, Selector: v.selector(p.Child("nodeSelector"), e.NodeSelector, rules.CompileSelector)}

		for j, name := range e.DNSNames {
			at := p.Child("dnsNames").Index(j)
			allowed.DNSNames = append(allowed.DNSNames, machine.CanonicalName(name))

			if _, err := netip.ParseAddr(name); err == nil {
				v.invalid(at, name, "is an IP address; list it in ipAddresses")
			} else if err := csrpolicy.CheckAllowedName(name); err != nil {
				v.invalid(at, name, "%v", err)
			}
		}

		for j, s := range e.IPAddresses {
			addr, _ := netip.ParseAddr(s) // the zero Addr is not allowed
			allowed.IPAddresses = append(allowed.IPAddresses, addr.Unmap())

			if err := csrpolicy.CheckAllowedAddress(addr); err != nil {
				v.invalid(p.Child("ipAddresses").Index(j), s, "%v", err)
			}
		}

		list = append(list, allowed)
	}

	return list
}

// uniqueName refuses a name that an earlier item of the list has. Names may be empty.
func (v *validator) uniqueName(names map[string]int, list *field.Path, i int, name string) {
	if first, found := names[name]; found && name != "" {
		v.invalid(list.Index(i).Child("name"), name, "is also the name of the entry in line %d", v.line(list.Index(first).Child("name")))

		return
	}

	names[name] = i
}

type pooled struct {
	prefix netip.Prefix
	pool   int
	path   *field.Path
}

func (v *validator) pools(path *field.Path, ipam IPAM) []CompiledPool {
	var (
		list []CompiledPool
		all  []pooled
	)

	names := map[string]int{}

	for i, e := range ipam.Pools {
		p := path.Index(i)
		v.uniqueName(names, path, i, e.Name)

		if e.Name == "" {
			v.errs = append(v.errs, field.Required(p.Child("name"), ""))
		}

		if len(e.CIDRs) == 0 {
			v.errs = append(v.errs, field.Required(p.Child("cidrs"), ""))
		}

		pool := CompiledPool{
			Name: e.Name, ContainsMachines: e.ContainsMachines, Selector: v.selector(p.Child("nodeSelector"), e.NodeSelector, rules.CompileNodeSelector),
		}

		for j, s := range e.CIDRs {
			at := p.Child("cidrs").Index(j)

			switch prefix, err := cidrset.ParsePrefix(s); {
			case err != nil:
				v.refuse(at, err)
			case prefix.Bits() == 0:
				v.invalid(at, s, "must not contain all addresses")
			default:
				if err := cidrset.CheckPods(prefix); err != nil {
					v.refuse(at, err)
				}

				added := pooled{prefix, i, at}
				v.overlaps(p, ipam.Pools, all, added)

				pool.CIDRs = append(pool.CIDRs, prefix)
				all = append(all, added)
			}
		}

		v.maskSizes(p, e, &pool, ipam.BlockSize)
		list = append(list, pool)
	}

	if ipam.BlockSize == "auto" {
		list = append(list, CompiledPool{BlockSizeAuto: true})
	}

	return list
}

// overlaps refuses a CIDR that overlaps an earlier one, unless another pool divides the same CIDR into other blocks.
func (v *validator) overlaps(path *field.Path, pools []Pool, all []pooled, added pooled) {
	for _, other := range all {
		name, contains := quote(pools[other.pool].Name), pools[added.pool].ContainsMachines

		switch {
		case !other.prefix.Overlaps(added.prefix):
		case other.prefix != added.prefix || other.pool == added.pool:
			v.invalid(added.path, added.prefix.String(), "overlaps %s of pool %s in line %d", other.prefix, name, v.line(other.path))

			return
		case pools[other.pool].ContainsMachines != contains:
			v.errs = append(v.errs, field.Invalid(path.Child("containsMachines"), contains,
				fmt.Sprintf("pool %s in line %d has the CIDR %s, too; set the same value for both", name, v.line(other.path), other.prefix)))

			return
		}
	}
}

// maskSizes sets the mask sizes of the pool, and refuses those that do not fit its CIDRs.
func (v *validator) maskSizes(path *field.Path, e Pool, pool *CompiledPool, size Choice) {
	reported := len(v.errs)
	atIPv4, atIPv6 := path.Child("maskSizeIPv4"), path.Child("maskSizeIPv6")
	pool.MaskSizeIPv4, pool.MaskSizeIPv6 = e.MaskSizeIPv4, e.MaskSizeIPv6
	pool.BlockSizeAuto = size == "auto" && pool.MaskSizeIPv4 == 0

	v.between(atIPv4, e.MaskSizeIPv4, 32)
	v.between(atIPv6, e.MaskSizeIPv6, 128)

	if len(v.errs) > reported {
		return
	}

	// CIDRs that are smaller than the default mask sizes of the flags need one of their own.
	for _, prefix := range pool.CIDRs {
		if prefix.Addr().Is6() {
			v.maskSize(atIPv6, prefix, pool.MaskSizeIPv6, 80)
		} else if !pool.BlockSizeAuto {
			v.maskSize(atIPv4, prefix, pool.MaskSizeIPv4, 24)
		}
	}
}

func (v *validator) between(path *field.Path, size, bits int) {
	if size < 0 || size > bits {
		v.errs = append(v.errs, field.Invalid(path, size, fmt.Sprintf("must be between 1 and %d", bits)))
	}
}

func (v *validator) maskSize(path *field.Path, prefix netip.Prefix, size, usual int) {
	if size == 0 {
		if prefix.Bits() > usual {
			v.errs = append(v.errs, field.Required(path, fmt.Sprintf("%s is smaller than a pod CIDR of the default mask size", prefix)))
		}
	} else if _, err := cidrset.NewPool(prefix, size); err != nil {
		v.refuse(path, err)
	}
}
